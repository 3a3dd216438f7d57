"""A store of updates that is a folder, perhaps of a web server, and fails as a test says."""

import threading


class FolderStore:
    """An `isthmus_server.mirror.place.UploadStore`."""

    def __init__(self, folder, url):
        self.folder = folder
        self.url = url
        self.error = None
        """What signing and reading raise."""
        self.stream = None
        """What is read in place of the file, and its size."""
        self.gate = threading.Event()
        self.removed = []

    def claim(self, owner):
        self.folder.mkdir(exist_ok=True)

    def names(self):
        return [path.name for path in self.folder.iterdir()]

    def remove(self, name):
        (self.folder / name).unlink(missing_ok=True)
        self.removed.append(name)

    def upload_address(self, name, size):
        if self.error is not None:
            raise self.error
        return f"{self.url}{name}?size={size}"

    def open(self, name):
        if self.error is not None:
            raise self.error
        if self.stream is not None:
            return self.stream
        path = self.folder / name
        return path.open("rb"), path.stat().st_size
