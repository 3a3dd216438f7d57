from pathlib import Path

from isthmus_flower.hosted.server import server_app

app = server_app(Path(__file__).with_name("hosted.toml"))
