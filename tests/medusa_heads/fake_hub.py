"""A Hub on loopback, as far as huggingface_hub needs one to load and share a model repository."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit


@dataclass
class Repo:
    """Commits by id, branches and tags by name, and the token without which it is not to be seen."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)
    token: str | None = None
    visibility: str | None = None

    def commit(self, files: Mapping[str, bytes], ref: str = "main", message: str = "") -> str:
        """Puts `files` over those of `ref` and moves it. Returns the commit's id."""
        before = self.commits.get(self.refs.get(ref, ""), {})
        oid = hashlib.sha1(f"{len(self.commits)} {ref}".encode()).hexdigest()
        self.commits[oid] = {**before, **files}
        self.refs[ref] = oid
        self.messages.append(message)
        return oid

    def resolve(self, revision: str) -> str | None:
        return revision if revision in self.commits else self.refs.get(revision)


@dataclass(frozen=True)
class Seen:
    method: str
    path: str
    token: str | None


class FakeHub:
    """`with FakeHub() as hub`; its address is `hub.url`."""

    def __init__(self, upload_mode: str = "regular"):
        self.repos: dict[str, Repo] = {}
        self.seen: list[Seen] = []
        self.blobs: dict[str, bytes] = {}
        self.upload_mode = upload_mode
        """How safetensors are to be sent: within the commit (regular), or by LFS beforehand (lfs)."""
        self.writers: set[str] | None = None
        """Tokens that may write; None: all."""
        self.broken = False
        """Answer every request with a 500."""
        hub = self

        class Handler(_Handler):
            server_hub = hub

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> FakeHub:
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def paths(self, method: str) -> list[str]:
        return [seen.path for seen in self.seen if seen.method == method]


class _Handler(BaseHTTPRequestHandler):
    server_hub: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None: ...

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def do_PUT(self) -> None:
        self._answer()

    def _answer(self) -> None:
        hub = self.server_hub
        path = unquote(urlsplit(self.path).path)
        authorization = self.headers.get("authorization", "")
        token = authorization.removeprefix("Bearer ") or None
        hub.seen.append(Seen(self.command, path, token))
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        if hub.broken:
            return self._send(500, {"error": "out of order"})
        parts = path.strip("/").split("/")
        if self.command in ("GET", "HEAD"):
            return self._read(parts, token)
        if hub.writers is not None and token not in hub.writers:
            return self._send(401, {"error": "Invalid username or password."})
        return self._write(parts, body)

    def _read(self, parts: list[str], token: str | None) -> None:
        api = parts[:2] == ["api", "models"]
        if api:
            parts = parts[2:]
        repo = self.server_hub.repos.get("/".join(parts[:2]))
        if repo is None or repo.token not in (None, token):
            return self._send(401 if token is None else 404, {"error": "Repository not found"}, code="RepoNotFound")
        action, rest = (parts[2], parts[3:]) if len(parts) > 2 else ("revision", ["main"])
        oid = repo.resolve(rest[0])
        if oid is None:
            return self._send(404, {"error": f"Invalid rev id: {rest[0]}"}, code="RevisionNotFound")
        files = repo.commits[oid]
        if api and action == "revision":
            return self._send(
                200, {"id": "/".join(parts[:2]), "sha": oid, "siblings": [{"rfilename": name} for name in files]}
            )
        if api and action == "tree":
            listing = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in files.items()
            ]
            return self._send(200, listing)
        name = "/".join(rest[1:])
        if action != "resolve" or name not in files:
            return self._send(404, {"error": "Entry not found"}, code="EntryNotFound", commit=oid)
        return self._send(200, files[name], commit=oid)

    def _write(self, parts: list[str], body: bytes) -> None:
        hub = self.server_hub
        if parts[0] == "lfs":
            if hashlib.sha256(body).hexdigest() != parts[1]:
                return self._send(400, {"error": "content and name differ"})
            hub.blobs[parts[1]] = body
            return self._send(200, {})
        if parts == ["api", "validate-yaml"]:
            return self._send(200, {"errors": [], "warnings": []})
        if parts == ["api", "repos", "create"]:
            asked = json.loads(body)
            name = f"{asked.get('organization') or 'me'}/{asked['name']}"
            status = 409 if name in hub.repos else 200
            repo = hub.repos.setdefault(name, Repo())
            if status == 200:
                repo.visibility = asked.get("visibility") or ("private" if asked.get("private") else None)
                repo.commit({".gitattributes": b""}, message="initial commit")
            return self._send(status, {"url": f"{hub.url}/{name}"})
        if parts[2:] == ["info", "lfs", "objects", "batch"]:
            objects = [
                {**wanted, "actions": {"upload": {"href": f"{hub.url}/lfs/{wanted['oid']}"}}}
                for wanted in json.loads(body)["objects"]
            ]
            return self._send(200, {"transfer": "basic", "objects": objects})
        repo = hub.repos.get("/".join(parts[2:4]))
        if repo is None:
            return self._send(404, {"error": "Repository not found"}, code="RepoNotFound")
        action, revision = parts[4], "/".join(parts[5:])
        if action == "branch":
            if revision in repo.refs:
                return self._send(409, {"error": "Reference already exists"})
            repo.refs[revision] = repo.refs["main"]
            return self._send(200, {})
        if action == "preupload":
            return self._send(200, {"files": [self._mode(wanted["path"]) for wanted in json.loads(body)["files"]]})
        if action == "commit":
            oid = self._commit(repo, revision, [json.loads(line) for line in body.splitlines()])
            url = f"{hub.url}/{'/'.join(parts[2:4])}/commit/{oid}"
            return self._send(200, {"commitUrl": url, "commitOid": oid, "success": True})
        return self._send(404, {"error": "no such endpoint here"})

    def _mode(self, path: str) -> dict[str, Any]:
        mode = self.server_hub.upload_mode if path.endswith(".safetensors") else "regular"
        return {"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": None}

    def _commit(self, repo: Repo, revision: str, lines: list[dict[str, Any]]) -> str:
        files, message = {}, ""
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                message = value["summary"]
            elif line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.server_hub.blobs[value["oid"]]
        return repo.commit(files, revision, message)

    def _send(self, status: int, content: Any, code: str | None = None, commit: str | None = None) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Content-Type", "application/octet-stream" if content is data else "application/json")
        self.send_header("ETag", f'"{hashlib.sha1(data).hexdigest()}"')
        if code is not None:
            self.send_header("X-Error-Code", code)
            self.send_header("X-Error-Message", str(content["error"]))
        if commit is not None:
            self.send_header("X-Repo-Commit", commit)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)
