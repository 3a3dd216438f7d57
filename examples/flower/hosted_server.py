from pathlib import Path

from isthmus_server.flower.hosted import server_app

app = server_app(Path(__file__).with_name("hosted.toml"))
