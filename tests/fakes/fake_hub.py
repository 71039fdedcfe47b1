"""A hub of models as huggingface_hub sees it: repositories, redirects to a CDN, ranges; faults on demand."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from aiohttp import web

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class FakeHub:
    """``repos``: the files of each repository, by name.

    ``cuts``: after how many bytes the next answers with a file break off. ``statuses``: what the next ones
    say in place of the file. ``gated``: repositories whose files need a token. ``misstated``: files whose
    hash the hub states wrongly, ``unstated``: not at all. ``whole``: ranges are not honoured.
    """

    repos: dict[str, dict[str, bytes]]
    cuts: list[int] = field(default_factory=list)
    statuses: list[int] = field(default_factory=list)
    gated: set[str] = field(default_factory=set)
    misstated: set[str] = field(default_factory=set)
    unstated: set[str] = field(default_factory=set)
    whole: bool = False
    sent: list[tuple[str, int]] = field(default_factory=list)
    """(file, first byte) of each answer with a file."""
    tokens: list[str | None] = field(default_factory=list)
    """What was sent as Authorization, to the hub and to its CDN."""

    def app(self) -> web.Application:
        """The routes that a download uses."""
        app = web.Application()
        app.router.add_get("/api/models/{owner}/{name}", self._info)
        app.router.add_get("/api/models/{owner}/{name}/revision/{revision}", self._info)
        app.router.add_get("/{owner}/{name}/resolve/{revision}/{path:.+}", self._resolve)
        app.router.add_get("/cdn/{owner}/{name}/{path:.+}", self._file)
        return app

    def _files(self, request: web.Request) -> dict[str, bytes]:
        repo = f"{request.match_info['owner']}/{request.match_info['name']}"
        if repo not in self.repos:
            raise web.HTTPNotFound(headers={"X-Error-Code": "RepoNotFound"})
        if request.match_info.get("revision", COMMIT) not in (COMMIT, "main"):
            raise web.HTTPNotFound(headers={"X-Error-Code": "RevisionNotFound"})
        return self.repos[repo]

    async def _info(self, request: web.Request) -> web.Response:
        siblings = []
        for name, content in self._files(request).items():
            digest = hashlib.sha256(b"other" if name in self.misstated else content).hexdigest()
            lfs = {"sha256": digest, "size": len(content), "pointerSize": 130}
            sibling = {"rfilename": name, "size": len(content), "blobId": "0" * 40}
            siblings.append(sibling if name in self.unstated else {**sibling, "lfs": lfs})
        repo = f"{request.match_info['owner']}/{request.match_info['name']}"
        return web.json_response({"id": repo, "sha": COMMIT, "siblings": siblings, "tags": ["gguf"]})

    async def _resolve(self, request: web.Request) -> web.Response:
        self._files(request)
        owner, name = request.match_info["owner"], request.match_info["name"]
        self.tokens.append(request.headers.get("Authorization"))
        if f"{owner}/{name}" in self.gated and not self.tokens[-1]:
            raise web.HTTPUnauthorized(headers={"X-Error-Code": "GatedRepo"})
        raise web.HTTPFound(f"/cdn/{owner}/{name}/{request.match_info['path']}")

    async def _file(self, request: web.Request) -> web.StreamResponse:
        path = request.match_info["path"]
        content = self._files(request)[path]
        if self.statuses:
            return web.Response(status=self.statuses.pop(0))
        start = 0 if self.whole else (request.http_range.start or 0)
        self.sent.append((path, start))
        response = web.StreamResponse(status=206 if start else 200)
        response.content_length = len(content) - start
        if start:
            response.headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        await response.prepare(request)
        if not self.cuts:
            await response.write(content[start:])
            return response
        await response.write(content[start : start + self.cuts.pop(0)])
        assert request.transport is not None
        # After what was written has gone out: close, not abort.
        request.transport.close()
        return response
