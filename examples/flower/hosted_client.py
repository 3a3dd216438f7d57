from pathlib import Path

from isthmus_flower.hosted.client import client_app

app = client_app(Path(__file__).with_name("hosted.toml"))
