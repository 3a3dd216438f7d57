from pathlib import Path

from isthmus_clients.flower.hosted import client_app

app = client_app(Path(__file__).with_name("hosted.toml"))
