"""A Hugging Face Hub in memory on 127.0.0.1: what huggingface_hub, diffusers and datasets ask of the real one.

Large files go by LFS: the newer storage (Xet) cannot be imitated, and clients must not look for it (HF_HUB_DISABLE_XET).
Requests that are not served are answered with 501, so that a client's new call is noticed.
"""

import base64
import hashlib
import json
import os
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

import yaml

REPO = r"/api/(?P<kind>models|datasets)/(?P<id>[^/]+/[^/]+)"
FILES = r"/(?:(?P<kind>datasets)/)?(?P<id>[^/]+/[^/]+)"
LARGE = (".safetensors", ".parquet")  # go by LFS, whatever their size


class HubError(Exception):
    """An answer that the client turns into an exception; the code tells it into which: (status, message, code)."""


@dataclass
class Fault:
    """At requests whose "METHOD path" matches, `then` is called, and a `status` is answered if there is one."""

    pattern: str
    status: int | None = None
    times: int = 1
    then: Callable[[], object] = lambda: None


def oid_of(path, content):
    """The Hub's ETag, and how a client knows that a file has not changed: git's name, or the SHA-256 of a large file."""
    git = hashlib.sha1(b"blob %d\0" % len(content) + content)
    return (hashlib.sha256(content) if path.endswith(LARGE) else git).hexdigest()


@dataclass
class Repo:
    """One repository: its files as of each commit, and its branches."""

    private: bool = False
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)

    @property
    def files(self):
        return self.commits[self.head]

    @property
    def head(self):
        return self.branches["main"]

    def commit(self, files, message, branch="main"):
        self.messages.append(message)
        sha = hashlib.sha1(repr((len(self.commits), message, sorted(files))).encode()).hexdigest()
        self.commits[sha] = files
        self.branches[branch] = sha
        return sha

    def resolve(self, revision):
        """The commit of a branch or of its own name, and its files."""
        sha = self.branches.get(revision, revision)
        if sha not in self.commits:
            raise HubError(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return sha, self.commits[sha]


class HubServer:
    """
    The server, as a context manager. `home` is the clients' HF_HOME, and `tokens` has the user of each token. `env` makes a
    subprocess use this server, with the first token; this process has read its own when it imported huggingface_hub.
    """

    def __init__(self, home, tokens=None):
        self.tokens = tokens or {"hf_of_the_test_user": "user"}
        self.repos, self.large = {}, {}  # (kind, id) -> `Repo`; SHA-256 -> content of files that were sent by LFS
        self.requests, self.faults = [], []  # (method, path) of every request so far; what is still to go wrong
        self.lock = threading.Lock()
        self._http = _Server(("127.0.0.1", 0), _Handler)
        self._http.hub = self
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
        self.env = kept | {
            "HF_ENDPOINT": self.url,
            "HF_TOKEN": next(iter(self.tokens)),
            "HF_HOME": str(home),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "NO_PROXY": "127.0.0.1",
        }

    def __enter__(self):
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def __exit__(self, *_):
        self._http.shutdown()
        self._http.server_close()

    def model(self, repo_id):
        return self.repos["models", repo_id]

    def dataset(self, repo_id):
        return self.repos["datasets", repo_id]

    def put(self, repo_id, files, kind="models"):
        """A repository with these files, as somebody else might have made it."""
        repo = self.repos[kind, repo_id] = Repo()
        repo.commit(dict(files), "initial commit")
        return repo

    def count(self, pattern):
        """Requests so far whose "METHOD path" matches."""
        return sum(re.search(pattern, " ".join(request)) is not None for request in self.requests)


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_):
        """A client that was killed is no news."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # Without this, small answers wait for the client's delayed acknowledgement.
    disable_nagle_algorithm = True

    def log_message(self, *_):
        pass

    def _answer_request(self):
        url = urlsplit(self.path)
        hub, path = self.server.hub, unquote(url.path)
        fault = self._fault(path)
        # Read in any case: what stays in the connection would be taken for the next request.
        self.body, self.query = self.rfile.read(int(self.headers.get("Content-Length", 0))), parse_qs(url.query)
        hub.requests.append((self.command, path))
        try:
            if fault and fault.status:
                raise HubError(fault.status, "Wanted by the test")
            self.user = self._authenticate()
            for methods, pattern, action in ROUTES:
                match = re.fullmatch(pattern, url.path)
                if match and self.command in methods:
                    # Only now: a revision may contain an escaped slash.
                    given = {key: unquote(value) for key, value in match.groupdict().items() if value is not None}
                    with hub.lock:
                        return action(self, **given)
            raise HubError(501, f"{self.command} {self.path} is not part of this server")
        except HubError as error:
            status, message, *code = error.args
            headers = dict(zip(("X-Error-Message", "X-Error-Code"), (message, *code), strict=False))
            self._send_json({"error": message}, status, headers)

    do_GET = do_HEAD = do_POST = do_DELETE = do_PUT = _answer_request

    def _fault(self, path):
        for fault in self.server.hub.faults:
            if fault.times > 0 and re.search(fault.pattern, f"{self.command} {path}"):
                fault.times -= 1
                fault.then()
                return fault
        return None

    def _send(self, content, status=200, headers=None):
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(content))} | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _send_json(self, data, status=200, headers=None):
        self._send(json.dumps(data).encode(), status, {"Content-Type": "application/json"} | (headers or {}))

    def _authenticate(self):
        scheme, _, token = self.headers.get("Authorization", "").partition(" ")
        if not scheme or scheme == "Basic":
            return None
        if scheme != "Bearer" or token not in self.server.hub.tokens:
            raise HubError(401, "Invalid credentials in Authorization header")
        return self.server.hub.tokens[token]

    def _repo(self, kind, id, to_write=False):
        repo = self.server.hub.repos.get((kind, id))
        owner = id.split("/")[0]
        if repo is None or (repo.private and self.user != owner):
            # A private repository is not told apart from one that does not exist.
            raise HubError(404 if self.user else 401, "Repository not found", "RepoNotFound")
        if to_write and self.user != owner:
            raise HubError(403 if self.user else 401, "You have no right to write here")
        return repo

    def _url(self, kind, id):
        return f"{self.server.hub.url}/{'' if kind == 'models' else kind + '/'}{id}"

    def whoami(self):
        if self.user is None:
            raise HubError(401, "Invalid username or password.")
        self._send_json({"type": "user", "name": self.user, "orgs": []})

    def create_repo(self):
        asked = json.loads(self.body)
        owner = asked.get("organization") or self.user
        if self.user is None or self.user != owner:
            raise HubError(403 if self.user else 401, f"You have no right to create a model under {owner!r}")
        repo_id, kind = f"{owner}/{asked['name']}", asked.get("type", "model") + "s"
        url = self._url(kind, repo_id)
        if (kind, repo_id) in self.server.hub.repos:
            return self._send_json({"error": "You already created this model repo", "url": url}, 409)
        # huggingface_hub 1 and later send the first, earlier versions the second.
        private = asked.get("visibility") == "private" or asked.get("private", False)
        repo = self.server.hub.repos[kind, repo_id] = Repo(private)
        repo.commit({".gitattributes": b""}, "initial commit")
        self._send_json({"url": url, "name": repo_id, "id": repo_id})

    def create_branch(self, kind, id, branch):
        repo = self._repo(kind, id, to_write=True)
        if branch in repo.branches:
            raise HubError(409, f"Reference refs/heads/{branch} exists already")
        repo.branches[branch] = repo.head
        self._send_json({})

    def auth_check(self, kind, id):
        self._repo(kind, id, to_write=True)
        self._send_json({})

    def validate_yaml(self):
        errors = metadata_errors(json.loads(self.body)["content"])
        self._send_json({"errors": [{"message": error} for error in errors], "warnings": []}, 400 if errors else 200)

    def preupload(self, kind, id, revision):
        _, files = self._repo(kind, id, to_write=True).resolve(revision)
        answers = []
        for path in (file["path"] for file in json.loads(self.body)["files"]):
            oid = oid_of(path, files[path]) if path in files else None
            mode = "lfs" if path.endswith(LARGE) else "regular"
            answers.append({"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        self._send_json({"files": answers})

    def lfs_batch(self, id, kind="models"):
        self._repo(kind, id)  # of a proposal, too
        objects = []
        for asked in json.loads(self.body)["objects"]:
            upload = {"actions": {"upload": {"href": f"{self.server.hub.url}/lfs/{asked['oid']}"}}}
            objects.append(asked | ({} if asked["oid"] in self.server.hub.large else upload))
        self._send_json({"transfer": "basic", "objects": objects})

    def lfs_put(self, oid):
        self.server.hub.large[oid] = self.body
        self._send(b"")

    def commit(self, kind, id, revision):
        repo = self._repo(kind, id, to_write=True)
        files, message = dict(repo.resolve(revision)[1]), ""
        for line in self.body.splitlines():
            key, value = (operation := json.loads(line))["key"], operation["value"]
            if key == "header":
                message = value["summary"]
            elif key == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif key == "lfsFile":
                files[value["path"]] = self.server.hub.large[value["oid"]]
            else:  # "deletedFile"
                del files[value["path"]]
        sha = repo.commit(files, message, revision)
        url = f"{self._url(kind, id)}/commit/{sha}"
        self._send_json({"success": True, "commitOid": sha, "hookOutput": "", "commitUrl": url})

    def info(self, kind, id, revision="main"):
        repo = self._repo(kind, id)
        sha, files = repo.resolve(revision)
        siblings = [{"rfilename": path} for path in sorted(files)]
        self._send_json({"id": id, "sha": sha, "private": repo.private, "siblings": siblings, "tags": []})

    def tree(self, kind, id, revision, folder=""):
        _, files = self._repo(kind, id).resolve(revision)
        prefix = f"{folder}/" if folder else ""
        inside = [path for path in sorted(files) if path.startswith(prefix)]
        if folder and not inside:
            raise HubError(404, "Entry not found", "EntryNotFound")
        is_whole = self.query.get("recursive", ["false"])[0].lower() == "true"
        shown = [path for path in inside if is_whole or "/" not in path.removeprefix(prefix)]
        folders = {prefix + path.removeprefix(prefix).partition("/")[0] for path in {*inside} - {*shown}}
        entries = [{"type": "directory", "path": path, "oid": "0" * 40, "size": 0} for path in sorted(folders)]
        self._send_json([*(_entry(path, files[path]) for path in shown), *entries])

    def resolve(self, id, revision, path, kind="models"):
        sha, files = self._repo(kind, id).resolve(revision)
        if path not in files:
            raise HubError(404, "Entry not found", "EntryNotFound")
        content = files[path]
        headers = {"ETag": f'"{oid_of(path, content)}"', "X-Repo-Commit": sha, "Accept-Ranges": "bytes"}
        if path.endswith(LARGE):
            headers |= {"X-Linked-Etag": headers["ETag"], "X-Linked-Size": str(len(content))}
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if not asked:
            return self._send(content, headers=headers)
        first, last = int(asked[1]), int(asked[2] or len(content) - 1)
        headers["Content-Range"] = f"bytes {first}-{min(last, len(content) - 1)}/{len(content)}"
        self._send(content[first : last + 1], 206, headers)


def _entry(path, content):
    """A file in a listing."""
    lfs = {"lfs": {"oid": oid_of(path, content), "size": len(content), "pointerSize": 130}} if path.endswith(LARGE) else {}
    return {"type": "file", "path": path, "size": len(content), "oid": oid_of("", content)} | lfs


def metadata_errors(content):
    """What is wrong with the metadata of a card, by the client's own reading of them; none is an error, too."""
    from huggingface_hub import ModelCard

    try:
        return [] if ModelCard(content).data.to_dict() else ["there is no metadata"]
    except (ValueError, KeyError, TypeError, yaml.YAMLError) as error:
        return [str(error)]


ROUTES = [
    (["GET"], r"/api/whoami-v2", _Handler.whoami),
    (["POST"], r"/api/repos/create", _Handler.create_repo),
    (["POST"], r"/api/validate-yaml", _Handler.validate_yaml),
    (["POST"], REPO + r"/preupload/(?P<revision>[^/]+)", _Handler.preupload),
    (["POST"], REPO + r"/commit/(?P<revision>[^/]+)", _Handler.commit),
    (["POST"], REPO + r"/branch/(?P<branch>[^/]+)", _Handler.create_branch),
    (["POST"], FILES + r"\.git/info/lfs/objects/batch", _Handler.lfs_batch),
    (["PUT"], r"/lfs/(?P<oid>[0-9a-f]+)", _Handler.lfs_put),
    (["GET"], REPO + r"/auth-check/write", _Handler.auth_check),
    (["GET"], REPO + r"(?:/revision/(?P<revision>[^/]+))?", _Handler.info),
    (["GET"], REPO + r"/tree/(?P<revision>[^/]+)(?:/(?P<folder>.+))?", _Handler.tree),
    (["GET", "HEAD"], FILES + r"/resolve/(?P<revision>[^/]+)/(?P<path>.+)", _Handler.resolve),
]
