"""A stand-in for the Hugging Face hub: as much of its HTTP as huggingface_hub asks for. Needs Python alone.

python3 hub.py PORT FOLDER [TOKEN [SLOW]]    serves FOLDER as the model org/model; what was asked for goes to standard
output. SLOW: seconds for each 100 kB of what is larger than 20 kB.
"""

import hashlib
import http.server
import json
import sys
import time
from pathlib import Path

COMMIT = "0" * 39 + "1"


class Hub(http.server.BaseHTTPRequestHandler):
    """`models`, `datasets`: {name: {path: bytes}}. `token`: whom it answers; "": everybody. `asked`: paths, so far."""

    protocol_version = "HTTP/1.1"
    token = ""
    slow = 0.0
    models: dict = {}
    datasets: dict = {}
    asked: list = []

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        self.asked.append(self.path)
        if self.path == "/":
            return self.answer(200, b"")
        if self.token and self.headers.get("Authorization") != f"Bearer {self.token}":
            return self.answer(401, b"", {"X-Error-Code": "GatedRepo", "X-Error-Message": "restricted"})
        for kind, repositories in (("models", self.models), ("datasets", self.datasets)):
            for name, files in repositories.items():
                if self.path.startswith(f"/api/{kind}/{name}/tree/"):
                    tree = [
                        {"type": "file", "path": p, "size": len(d), "oid": hashlib.sha1(d).hexdigest()}
                        for p, d in files.items()
                    ]
                    return self.answer(200, json.dumps(tree).encode())
                if self.path.startswith(f"/api/{kind}/{name}"):
                    found = {"id": name, "sha": COMMIT, "siblings": [{"rfilename": one} for one in files]}
                    return self.answer(200, json.dumps(found).encode())
                at = f"/{name}/resolve/{COMMIT}/" if kind == "models" else f"/{kind}/{name}/resolve/{COMMIT}/"
                if self.path.startswith(at) and self.path.removeprefix(at) in files:
                    data = files[self.path.removeprefix(at)]
                    etag = hashlib.sha1(data).hexdigest()
                    return self.answer(200, data, {"X-Repo-Commit": COMMIT, "ETag": f'"{etag}"'})
        return self.answer(404, b"", {"X-Error-Code": "RepoNotFound"})

    def answer(self, status, body, headers=None):
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            for at in range(0, len(body), 100_000):
                time.sleep(self.slow if len(body) > 20_000 else 0)
                self.wfile.write(body[at : at + 100_000])

    def log_message(self, *_):
        pass


class Told(list):
    """What was asked for, as it comes."""

    def append(self, path):
        print(path, flush=True)
        super().append(path)


if __name__ == "__main__":
    port, folder, token, slow = [*sys.argv[1:], *("", "0")[len(sys.argv) - 3 :]]
    Hub.models = {"org/model": {one.name: one.read_bytes() for one in Path(folder).iterdir()}}
    Hub.asked, Hub.token, Hub.slow = Told(), token, float(slow)
    http.server.ThreadingHTTPServer(("0.0.0.0", int(port)), Hub).serve_forever()
