from pathlib import Path

from isthmus_server.flower.server_run import server_app

app = server_app(Path(__file__).with_name("hosted.toml"))
