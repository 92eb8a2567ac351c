"""A Hugging Face Hub in memory on 127.0.0.1: what huggingface_hub and diffusers ask of the real one, for model repositories.

Every file goes inline into its commit ("regular"), as the real Hub does with small ones: its storage of large files (Xet)
cannot be imitated, and clients must not look for it (HF_HUB_DISABLE_XET). Whatever is not served is answered with 501,
so that a client's new call is noticed rather than mistaken for a missing file.
"""

import base64
import hashlib
import json
import os
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

REPO = r"/api/(?P<kind>models)/(?P<id>[^/]+/[^/]+)"


class HubError(Exception):
    """An answer that the client turns into an exception; the code tells it into which."""

    def __init__(self, status, message, code=None):
        super().__init__(message)
        self.status, self.message, self.code = status, message, code


def git_oid(content):
    """The name git gives to a file; the Hub's ETag, and how a client knows that a file has not changed."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@dataclass
class Repo:
    """One repository: its files as of each commit, the last of which is `main`."""

    private: bool = False
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)

    @property
    def files(self):
        """Path -> content on `main`."""
        return self.commits[self.head]

    @property
    def head(self):
        return list(self.commits)[-1]

    def commit(self, files, message):
        self.messages.append(message)
        sha = hashlib.sha1(repr((len(self.commits), message, sorted(files))).encode()).hexdigest()
        self.commits[sha] = files
        return sha

    def resolve(self, revision):
        sha = self.head if revision == "main" else revision
        if sha not in self.commits:
            raise HubError(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return sha


class HubServer:
    """
    The server, as a context manager.

    Args:
        home: Folder for the clients' cache and settings (HF_HOME).
        tokens: Token -> name of the user it belongs to.

    Attributes:
        env: The environment that makes a subprocess use this server, with the first token. Not for this process:
            huggingface_hub reads it once, when it is imported.
        repos: (kind, id) -> `Repo`.
        requests: (method, path) of every request so far.
        broken: Actions that fail with 500, such as "commit".
    """

    def __init__(self, home, tokens=None):
        self.tokens = tokens or {"hf_of_the_test_user": "user"}
        self.repos = {}
        self.requests = []
        self.broken = set()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
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

    def env_without(self, *names):
        return {key: value for key, value in self.env.items() if key not in names}

    def model(self, repo_id):
        return self.repos["models", repo_id]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # Without this, small answers wait for the client's delayed acknowledgement.
    disable_nagle_algorithm = True

    def log_message(self, *_):
        pass

    def _answer_request(self):
        # Read in any case: what stays in the connection would be taken for the next request.
        self.body = self._read_body()
        url = urlsplit(self.path)
        self.query = parse_qs(url.query)
        self.server.hub.requests.append((self.command, unquote(url.path)))
        try:
            self.user = self._authenticate()
            for methods, pattern, action in ROUTES:
                match = re.fullmatch(pattern, url.path)
                if match and self.command in methods:
                    if action.__name__ in self.server.hub.broken:
                        raise HubError(500, "Broken by the test")
                    # Only now: a revision may contain an escaped slash.
                    return action(self, **{key: unquote(value) for key, value in match.groupdict().items()})
            raise HubError(501, f"{self.command} {self.path} is not part of this server")
        except HubError as error:
            headers = {"X-Error-Message": error.message} | ({"X-Error-Code": error.code} if error.code else {})
            self._send_json({"error": error.message}, error.status, headers)

    do_GET = do_HEAD = do_POST = do_DELETE = do_PUT = _answer_request

    def _read_body(self):
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        chunks = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)

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
        if not scheme:
            return None
        if scheme != "Bearer" or token not in self.server.hub.tokens:
            raise HubError(401, "Invalid credentials in Authorization header")
        return self.server.hub.tokens[token]

    def _repo(self, kind, id, to_write=False):
        repo = self.server.hub.repos.get((kind, id))
        owned = self.user == id.split("/")[0]
        if repo is None or (repo.private and not owned):
            # A private repository is not told apart from one that does not exist.
            raise HubError(404 if self.user else 401, "Repository not found", "RepoNotFound")
        if to_write and not owned:
            raise HubError(403 if self.user else 401, "You have no right to write here")
        return repo

    def whoami(self):
        if self.user is None:
            raise HubError(401, "Invalid username or password.")
        self._send_json({"type": "user", "name": self.user, "fullname": self.user, "orgs": []})

    def create_repo(self):
        asked = json.loads(self.body)
        owner = asked.get("organization") or self.user
        if self.user is None or owner != self.user:
            raise HubError(403 if self.user else 401, f"You have no right to create a model under {owner!r}")
        repo_id = f"{owner}/{asked['name']}"
        url = f"{self.server.hub.url}/{repo_id}"
        key = (asked.get("type", "model") + "s", repo_id)
        if key in self.server.hub.repos:
            return self._send_json({"error": "You already created this model repo", "url": url}, 409)
        # huggingface_hub 1 and later send the first, earlier versions the second.
        repo = self.server.hub.repos[key] = Repo(asked.get("visibility") == "private" or asked.get("private", False))
        repo.commit({".gitattributes": b""}, "initial commit")
        self._send_json({"url": url, "name": repo_id, "id": repo_id})

    def validate_yaml(self):
        """The real one checks each field; this one only that there is metadata at all, and that it has some shape."""
        block = re.match(r"---\n(.*?)\n---\n", json.loads(self.body)["content"], re.DOTALL)
        lines = block.group(1).splitlines() if block else [""]
        wrong = [line for line in lines if not re.match(r"[\w-]+:|\s*- |\s+\w", line)]
        errors = [{"message": f"not metadata: {line!r}"} for line in wrong]
        self._send_json({"errors": errors, "warnings": []}, 400 if errors else 200)

    def preupload(self, kind, id, revision):
        files = self._repo(kind, id, to_write=True).files
        answers = [
            {
                "path": file["path"],
                "uploadMode": "regular",
                "shouldIgnore": False,
                "oid": git_oid(files[file["path"]]) if file["path"] in files else None,
            }
            for file in json.loads(self.body)["files"]
        ]
        self._send_json({"files": answers})

    def commit(self, kind, id, revision):
        repo = self._repo(kind, id, to_write=True)
        if repo.resolve(revision) != repo.head:
            raise HubError(400, "Only commits to main are part of this server")
        files, message = dict(repo.files), ""
        for line in self.body.splitlines():
            key, value = (operation := json.loads(line))["key"], operation["value"]
            if key == "header":
                message = value["summary"]
                if value.get("parentCommit", repo.head) != repo.head:
                    raise HubError(412, "A commit has happened since. Please refresh and try again.")
            elif key == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif key == "deletedFile":
                del files[value["path"]]
            else:
                raise HubError(501, f"{key!r} is not part of this server")
        sha = repo.commit(files, message)
        url = f"{self.server.hub.url}/{id}/commit/{sha}"
        self._send_json({"success": True, "commitOid": sha, "commitUrl": url, "hookOutput": ""})

    def info(self, kind, id, revision="main"):
        repo = self._repo(kind, id)
        sha = repo.resolve(revision)
        siblings = [{"rfilename": path} for path in sorted(repo.commits[sha])]
        self._send_json({"id": id, "sha": sha, "private": repo.private, "siblings": siblings})

    def tree(self, kind, id, revision):
        if self.query.get("recursive", ["false"])[0].lower() != "true":
            raise HubError(501, "Only the whole tree is part of this server")
        repo = self._repo(kind, id)
        files = sorted(repo.commits[repo.resolve(revision)].items())
        self._send_json([{"type": "file", "path": path, "size": len(data), "oid": git_oid(data)} for path, data in files])

    def resolve(self, id, revision, path, kind="models"):
        repo = self._repo(kind, id)
        sha = repo.resolve(revision)
        if path not in repo.commits[sha]:
            raise HubError(404, "Entry not found", "EntryNotFound")
        content = repo.commits[sha][path]
        self._send(content, headers={"ETag": f'"{git_oid(content)}"', "X-Repo-Commit": sha})


ROUTES = [
    (["GET"], r"/api/whoami-v2", _Handler.whoami),
    (["POST"], r"/api/repos/create", _Handler.create_repo),
    (["POST"], r"/api/validate-yaml", _Handler.validate_yaml),
    (["POST"], REPO + r"/preupload/(?P<revision>[^/]+)", _Handler.preupload),
    (["POST"], REPO + r"/commit/(?P<revision>[^/]+)", _Handler.commit),
    (["GET"], REPO, _Handler.info),
    (["GET"], REPO + r"/revision/(?P<revision>[^/]+)", _Handler.info),
    (["GET"], REPO + r"/tree/(?P<revision>[^/]+)", _Handler.tree),
    (["GET", "HEAD"], r"/(?P<id>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<path>.+)", _Handler.resolve),
]
