"""A Hub on loopback: enough of its API for the real client, with faults on request and a log of every call.

Two ports: the API, and a "CDN" that holds the large objects. Requests that reach the CDN with an access token
are counted, because there must be none.
"""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

TOKEN = "hf_loopbackTokenForTests"
LFS_FROM = 4096  # bytes; the real Hub looks at .gitattributes and at 10 MB


@dataclass
class Fault:
    """What goes wrong with the calls that match, ``times`` times (-1: always).

    when     "before": the call has no effect; "after": it takes effect, then the answer is lost
    status   the answer; None: the connection is dropped
    after    for a dropped upload or download: bytes that pass before
    """

    method: str
    path: str
    status: int | None = None
    times: int = 1
    when: str = "before"
    headers: dict[str, str] = field(default_factory=dict)
    text: str = "the server said so"
    after: int = 0
    wait: threading.Event | None = None  # hold the call until this is set

    def matches(self, method: str, path: str) -> bool:
        return self.times != 0 and method == self.method and re.search(self.path, path) is not None


@dataclass(frozen=True)
class Call:
    method: str
    path: str
    status: int
    size: int  # bytes of the request's body
    authorized: bool
    range: str | None


@dataclass
class Repo:
    private: bool = False
    commits: list[tuple[str, dict[str, bytes]]] = field(default_factory=list)
    large: set[str] = field(default_factory=set)  # paths stored as LFS
    gated: bool = False
    read_only: bool = False

    @property
    def head(self) -> str:
        return self.commits[-1][0]

    @property
    def tree(self) -> dict[str, bytes]:
        return self.commits[-1][1]

    def commit(self, tree: dict[str, bytes]) -> str:
        parent = self.commits[-1][0] if self.commits else ""
        listing = "".join(f"{k} {hashlib.sha256(v).hexdigest()}" for k, v in sorted(tree.items()))
        sha = hashlib.sha1(f"{parent} {listing} {len(self.commits)}".encode()).hexdigest()
        self.commits.append((sha, dict(tree)))
        return sha


class FakeHub:
    """State and two servers. ``calls`` is the log; ``faults`` are tried in order."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.card_warnings: list[str] = []
        self.objects: dict[str, bytes] = {}
        self.calls: list[Call] = []
        self.faults: list[Fault] = []
        self.role = "write"
        self.user = "tester"
        self.namespaces = {"tester", "ORG"}
        self.ranges = True
        self.leaks = 0  # requests at the CDN that carried a token
        self.lock = threading.Lock()
        self.api = _serve(_api_handler(self))
        self.cdn = _serve(_cdn_handler(self))
        self.url = f"http://127.0.0.1:{self.api.server_address[1]}"
        self.cdn_url = f"http://127.0.0.1:{self.cdn.server_address[1]}"

    def add(self, repo_id: str, files: dict[str, bytes], **more: Any) -> Repo:
        repo = Repo(**more)
        repo.commit({".gitattributes": b"*.safetensors filter=lfs\n", **files})
        for name, data in files.items():
            if is_large(name, len(data)):
                self.objects[hashlib.sha256(data).hexdigest()] = data
                repo.large.add(name)
        self.repos[repo_id] = repo
        return repo

    def count(self, method: str, path: str) -> int:
        return sum(1 for c in self.calls if c.method == method and re.search(path, c.path))

    def sent(self, method: str, path: str) -> int:
        return sum(c.size for c in self.calls if c.method == method and re.search(path, c.path))

    def fault(self, method: str, path: str, status: int | None = None, **more: Any) -> Fault:
        made = Fault(method, path, status, **more)
        self.faults.append(made)
        return made

    def close(self) -> None:
        for server in (self.api, self.cdn):
            server.shutdown()
            server.server_close()


@contextmanager
def running() -> Iterator[FakeHub]:
    hub = FakeHub()
    try:
        yield hub
    finally:
        hub.close()


def is_large(name: str, size: int) -> bool:
    return name.endswith(".safetensors") or size >= LFS_FROM


def git_sha1(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is part of the tests."""


def _serve(handler: type[BaseHTTPRequestHandler]) -> _Server:
    server = _Server(("127.0.0.1", 0), handler)
    threading.Thread(target=lambda: server.serve_forever(poll_interval=0.02), daemon=True).start()
    return server


class _Base(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1
    hub: FakeHub
    body: bytes
    fault: Fault | None
    name_in_log = ""

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._run()

    def do_HEAD(self) -> None:
        self._run()

    def do_POST(self) -> None:
        self._run()

    def do_PUT(self) -> None:
        self._run()

    def _run(self) -> None:
        self.fault = self._take_fault()
        if self.fault is not None and self.fault.wait is not None:
            self.fault.wait.wait(30)
        if (
            self.fault is not None
            and self.fault.when == "before"
            and self.fault.status is None
            and self.command == "PUT"
        ):
            self.body = self.rfile.read(self.fault.after)
            return self._drop()
        self.body = self._read_body()
        if self.fault is not None and self.fault.when == "before":
            if self.fault.status is not None:
                return self.error(self.fault.status, self.fault.text, **self.fault.headers)
            if self.command != "GET" or not self.fault.after:
                return self._drop()
        if self.fault is not None and self.fault.when == "after" and self.fault.status is None:
            self._send_nothing = True
        self.route()

    def _take_fault(self) -> Fault | None:
        with self.hub.lock:
            for fault in self.hub.faults:
                if fault.matches(self.command, self.path):
                    fault.times -= 1
                    return fault
        return None

    def _read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            parts = []
            while size := int(self.rfile.readline().strip() or b"0", 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def route(self) -> None:
        raise NotImplementedError

    _send_nothing = False

    def _drop(self) -> None:
        self._log(0)
        self.close_connection = True
        self.connection.close()

    def _log(self, status: int) -> None:
        sent_token = "authorization" in {k.lower() for k in self.headers}
        with self.hub.lock:
            self.hub.calls.append(
                Call(
                    self.command,
                    self.name_in_log + self.path,
                    status,
                    len(self.body),
                    sent_token,
                    self.headers.get("Range"),
                )
            )

    def answer(self, status: int, data: bytes, **headers: str) -> None:
        if self._send_nothing:
            return self._drop()
        self._log(status)
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key.replace("_", "-"), value)
        self.send_header("Content-Length", headers.pop("length", str(len(data))))
        self.end_headers()
        if self.command == "HEAD":
            return None
        cut = (
            self.fault.after
            if self.fault is not None and self.fault.status is None and self.fault.after
            else None
        )
        self.wfile.write(data if cut is None else data[:cut])
        self.wfile.flush()
        if cut is not None:
            self.close_connection = True
        return None

    def json(self, value: Any, status: int = 200, **headers: str) -> None:
        self.answer(status, json.dumps(value).encode(), Content_Type="application/json", **headers)

    def error(self, status: int, text: str, code: str | None = None, **headers: str) -> None:
        extra = {"X_Error_Message": text, **({"X_Error_Code": code} if code else {}), **headers}
        self.json({"error": text}, status, **extra)

    def ranged(self, data: bytes, **headers: str) -> None:
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if asked is None or not self.hub.ranges:
            return self.answer(200, data, Accept_Ranges="bytes", **headers)
        start, end = int(asked[1]), min(int(asked[2] or len(data)), len(data) - 1)
        content = f"bytes {start}-{end}/{len(data)}"
        return self.answer(206, data[start : end + 1], Content_Range=content, **headers)


Route = Callable[..., None]


def _api_handler(state: FakeHub) -> type[BaseHTTPRequestHandler]:
    class Handler(_Api):
        hub = state

    return Handler


def _cdn_handler(state: FakeHub) -> type[BaseHTTPRequestHandler]:
    class Handler(_Cdn):
        hub = state

    return Handler


class _Cdn(_Base):
    """Objects by their sha256: GET with ranges, PUT."""

    name_in_log = "cdn:"

    def route(self) -> None:
        oid = urlsplit(self.path).path.rpartition("/")[2]
        if self.headers.get("Authorization"):
            self.hub.leaks += 1
        if self.command == "PUT":
            if hashlib.sha256(self.body).hexdigest() != oid:
                return self.error(400, "hash differs")
            self.hub.objects[oid] = self.body
            return self.answer(200, b"")
        if oid not in self.hub.objects:
            return self.error(404, "no such object")
        return self.ranged(self.hub.objects[oid])


class _Api(_Base):
    """The API and the `resolve` addresses."""

    def route(self) -> None:
        path = unquote(urlsplit(self.path).path)
        for method, pattern, run in ROUTES:
            match = re.fullmatch(pattern, path)
            if match and self.command in method.split("|"):
                return run(self, *match.groups())
        return self.error(404, f"no route {self.command} {path}")

    @property
    def known(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def repo(self, repo_id: str, revision: str | None = None) -> tuple[Repo, str, dict[str, bytes]] | None:
        """Find a repository and one commit, or answer with the Hub's error."""
        if self.headers.get("Authorization") and not self.known:
            self.error(401, "Invalid credentials in Authorization header")
            return None
        found = self.hub.repos.get(repo_id)
        if found is None or (found.private and not self.known):
            self.error(404 if self.known else 401, "Repository not found", "RepoNotFound")
            return None
        if found.gated and "/resolve/" in self.path:
            self.error(403, "Access to this model is restricted", "GatedRepo")
            return None
        for sha, tree in found.commits:
            if revision in (None, "main", "HEAD"):
                return found, found.head, found.tree
            if revision == sha:
                return found, sha, tree
        self.error(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return None

    def whoami(self) -> None:
        if not self.known:
            return self.error(401, "Invalid credentials in Authorization header")
        auth = {"type": "access_token", "accessToken": {"displayName": "t", "role": self.hub.role}}
        return self.json({"type": "user", "name": self.hub.user, "orgs": [{"name": "ORG"}], "auth": auth})

    def create(self) -> None:
        value = json.loads(self.body)
        owner = value.get("organization") or self.hub.user
        repo_id = f"{owner}/{value['name']}"
        if not self.known:
            return self.error(401, "Invalid credentials in Authorization header")
        if owner not in self.hub.namespaces or self.hub.role == "read":
            return self.error(403, f"You don't have the rights to create a model under the namespace {owner}")
        if repo_id in self.hub.repos:
            url = f"{self.hub.url}/{repo_id}"
            return self.json({"url": url, "error": "You already created this model repo"}, 409)
        private = value.get("private") or value.get("visibility") == "private"
        self.hub.add(repo_id, {}, private=bool(private))
        return self.json({"url": f"{self.hub.url}/{repo_id}", "name": repo_id})

    def validate_yaml(self) -> None:
        content = json.loads(self.body)["content"]
        front = content.split("---")[1] if content.startswith("---") else ""
        bad = [
            line
            for line in front.splitlines()
            if re.match(r"(license|base_model_relation): *(\d|\[|$)", line)
        ]
        errors = [{"message": f"not allowed: {line}"} for line in bad]
        warnings = [{"message": text} for text in self.hub.card_warnings]
        return self.json({"errors": errors, "warnings": warnings}, 400 if errors else 200)

    def preupload(self, repo_id: str, revision: str) -> None:
        found = self.repo(repo_id)
        if found is None:
            return None
        if not self.may_write(repo_id):
            return self.error(
                403, "Forbidden: pass `create_pr=1` as a query parameter to create a Pull Request"
            )
        files = []
        for item in json.loads(self.body)["files"]:
            old = found[2].get(item["path"])
            oid = None
            if old is not None:
                oid = hashlib.sha256(old).hexdigest() if item["path"] in found[0].large else git_sha1(old)
            mode = "lfs" if is_large(item["path"], item["size"]) else "regular"
            files.append({"path": item["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        return self.json({"files": files})

    def may_write(self, repo_id: str) -> bool:
        return self.known and self.hub.role != "read" and not self.hub.repos[repo_id].read_only

    def lfs_batch(self, repo_id: str) -> None:
        if not self.may_write(repo_id):
            return self.error(403, "Forbidden")
        objects = []
        for item in json.loads(self.body)["objects"]:
            entry: dict[str, Any] = {"oid": item["oid"], "size": item["size"]}
            if item["oid"] not in self.hub.objects:
                verify = {"href": f"{self.hub.url}/{repo_id}.git/info/lfs/objects/verify"}
                upload = {"href": f"{self.hub.cdn_url}/objects/{item['oid']}"}
                entry["actions"] = {"upload": upload, "verify": verify}
            objects.append(entry)
        return self.json({"transfer": "basic", "objects": objects})

    def lfs_verify(self, repo_id: str) -> None:
        value = json.loads(self.body)
        good = len(self.hub.objects.get(value["oid"], b"")) == value["size"]
        return self.json({}) if good else self.error(404, "object not found")

    def commit(self, repo_id: str, revision: str) -> None:
        found = self.repo(repo_id)
        if found is None:
            return None
        if not self.may_write(repo_id):
            return self.error(403, "Forbidden")
        repo = found[0]
        lines = [json.loads(line) for line in self.body.splitlines() if line.strip()]
        with self.hub.lock:
            parent = lines[0]["value"].get("parentCommit")
            stale = parent is not None and parent != repo.head
            if not stale:
                sha = repo.commit(self.changed(repo, lines[1:]))
        if stale:
            return self.error(412, "A commit has happened since. Please refresh and try again.")
        return self.json(
            {"success": True, "commitOid": sha, "commitUrl": f"{self.hub.url}/{repo_id}/commit/{sha}"}
        )

    def changed(self, repo: Repo, lines: list[dict[str, Any]]) -> dict[str, bytes]:
        tree = dict(repo.tree)
        for line in lines:
            value = line["value"]
            match line["key"]:
                case "file":
                    tree[value["path"]] = base64.b64decode(value["content"])
                    repo.large.discard(value["path"])
                case "lfsFile":
                    tree[value["path"]] = self.hub.objects[value["oid"]]
                    repo.large.add(value["path"])
                case "deletedFile":
                    del tree[value["path"]]
                case other:
                    raise ValueError(other)
        return tree

    def info(self, repo_id: str, revision: str | None = None) -> None:
        found = self.repo(repo_id, revision)
        if found is None:
            return None
        repo, sha, tree = found
        blobs = parse_qs(urlsplit(self.path).query).get("blobs") or ["0"]
        siblings = [
            self.sibling(repo, name, data, blobs[0].lower() in ("1", "true")) for name, data in tree.items()
        ]
        value = {"_id": "1", "id": repo_id, "modelId": repo_id, "sha": sha, "siblings": siblings}
        flags = {"private": repo.private, "gated": repo.gated, "disabled": False}
        return self.json({**value, **flags, "tags": [], "downloads": 0, "likes": 0})

    def sibling(self, repo: Repo, name: str, data: bytes, blobs: bool) -> dict[str, Any]:
        if not blobs:
            return {"rfilename": name}
        entry: dict[str, Any] = {"rfilename": name, "size": len(data), "blobId": git_sha1(data)}
        if name in repo.large:
            entry["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
        return entry

    def tree(self, repo_id: str, revision: str) -> None:
        found = self.repo(repo_id, revision)
        if found is None:
            return None
        entries = []
        for name, data in found[2].items():
            entry: dict[str, Any] = {"type": "file", "path": name, "size": len(data), "oid": git_sha1(data)}
            if name in found[0].large:
                entry["lfs"] = {
                    "oid": hashlib.sha256(data).hexdigest(),
                    "size": len(data),
                    "pointerSize": 134,
                }
            entries.append(entry)
        return self.json(entries)

    def resolve(self, repo_id: str, revision: str, name: str) -> None:
        found = self.repo(repo_id, revision)
        if found is None:
            return None
        repo, sha, tree = found
        if name not in tree:
            return self.error(404, "Entry not found", "EntryNotFound", X_Repo_Commit=sha)
        data = tree[name]
        if name in repo.large:
            oid = hashlib.sha256(data).hexdigest()
            linked = {"X_Linked_Size": str(len(data)), "X_Linked_Etag": f'"{oid}"', "ETag": f'"{oid}"'}
            there = f"{self.hub.cdn_url}/objects/{oid}"
            return self.answer(302, b"", Location=there, X_Repo_Commit=sha, **linked)
        return self.ranged(data, X_Repo_Commit=sha, ETag=f'"{git_sha1(data)}"')


ID = r"([\w.-]+/[\w.-]+)"
ROUTES: tuple[tuple[str, str, Route], ...] = (
    ("GET", r"/api/whoami-v2", _Api.whoami),
    ("POST", r"/api/repos/create", _Api.create),
    ("POST", r"/api/validate-yaml", _Api.validate_yaml),
    ("POST", rf"/api/models/{ID}/preupload/([^/]+)", _Api.preupload),
    ("POST", rf"/{ID}\.git/info/lfs/objects/batch", _Api.lfs_batch),
    ("POST", rf"/{ID}\.git/info/lfs/objects/verify", _Api.lfs_verify),
    ("POST", rf"/api/models/{ID}/commit/([^/]+)", _Api.commit),
    ("GET", rf"/api/models/{ID}/tree/([^/]+)", _Api.tree),
    ("GET", rf"/api/models/{ID}/revision/(.+)", _Api.info),
    ("GET", rf"/api/models/{ID}", _Api.info),
    ("GET|HEAD", rf"/{ID}/resolve/([^/]+)/(.+)", _Api.resolve),
    ("GET", rf"/api/datasets/{ID}/revision/(.+)", _Api.info),
    ("GET", rf"/api/datasets/{ID}", _Api.info),
    ("GET|HEAD", rf"/datasets/{ID}/resolve/([^/]+)/(.+)", _Api.resolve),
)
