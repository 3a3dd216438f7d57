"""The console's application: which address shows which page."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import sqlite3
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from isthmus.errors import UserError
from isthmus_server.read.console.fleet_page import device_rows
from isthmus_server.read.console.live import LiveUpdates
from isthmus_server.read.console.pages import Pages, Paging
from isthmus_server.read.console.run_page import number, round_page, run_page
from isthmus_server.read.console.sources import ConsoleSource

MAX_COMPARED = 6
"""Runs that one chart overlays."""

PAGE_OTHERS = 30
"""Runs that are offered for a comparison."""

MAX_DIGITS = 18
"""Most digits of a round's number: more do not fit an integer of SQLite."""

MAX_QUERY = 2000
"""Characters of an address's query."""

_STATIC = Path(__file__).with_name("static")

_T = TypeVar("_T")

log = logging.getLogger(__name__)


class ConsoleApp:
    """Answers requests about one source.

    Guarantees:
      * everything is read in one thread of its own, so that streams do not wait for pages;
      * it writes nothing.
    """

    def __init__(self, path: Path) -> None:
        """Show what is in a directory.

        Raises:
            UserError: there is nothing that a console could show.
        """
        self.source = ConsoleSource(path)
        self.pages = Pages()
        self.live = LiveUpdates(lambda name: self._read(lambda: self.source.version(name)))
        self._reader = ThreadPoolExecutor(1, "console-reader")
        self.app = Starlette(
            routes=[
                Route("/", self._jobs),
                Route("/devices", self._devices),
                Route("/runs/{name}", self._run),
                Route("/runs/{name}/series.json", self._series),
                Route("/runs/{name}/rounds/{round}", self._round),
                Route("/events", self._events),
                Mount("/static", StaticFiles(directory=_STATIC)),
            ],
            exception_handlers={
                404: self._missing,
                UserError: self._unreadable,
                sqlite3.Error: self._unreadable,
                OSError: self._unreadable,
            },
        )

    async def close(self) -> None:
        """Close all runs; streams must have ended."""
        await self._read(self.source.close)
        self._reader.shutdown()

    async def _read(self, read: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._reader, read)

    # -- pages -------------------------------------------------------------------------------------

    async def _jobs(self, request: Request) -> Response:
        if self.source.is_run:
            return RedirectResponse(f"/runs/{self.source.run_names()[0]}", 303)
        query = _query(request)

        def render() -> str:
            version = self.source.version("")
            paging = Paging(number(query, "page"), self.source.jobs(0, 0)[1], "page")
            jobs, total = self.source.jobs(paging.first, paging.size)
            fleet = self.source.fleet()
            return self._page(
                "jobs",
                "",
                version,
                jobs=jobs,
                paging=dataclasses.replace(paging, total=total),
                waiting={} if fleet is None or not fleet.is_current() else fleet.waiting,
                running=fleet is not None and fleet.is_current(),
                query=query,
            )

        return _html(await self._read(render))

    async def _run(self, request: Request) -> Response:
        name = request.path_params["name"]
        query = _query(request)

        def render() -> str | None:
            try:
                run = self.source.run(name)
            except KeyError:
                return None
            values = run_page(run, query)
            names = self.source.run_names()
            wanted = [each for each in query.get("compare", "").split(",") if each in names]
            others = [each for each in names if each != name]
            return self._page(
                "run",
                name,
                run.version(),
                compared=[each for each in wanted if each != name][: MAX_COMPARED - 1],
                others=others[:PAGE_OTHERS],
                **values,
            )

        page = await self._read(render)
        return await self._missing(request) if page is None else _html(page)

    async def _round(self, request: Request) -> Response:
        name = request.path_params["name"]
        query = _query(request)
        text = request.path_params["round"]
        if not (text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS):
            return await self._missing(request)

        def render() -> str | None:
            try:
                run = self.source.run(name)
            except KeyError:
                return None
            values = round_page(run, int(text), query)
            return None if values is None else self._page("round", name, run.version(), **values)

        page = await self._read(render)
        return await self._missing(request) if page is None else _html(page)

    async def _series(self, request: Request) -> Response:
        name = request.path_params["name"]
        try:
            series = await self._read(lambda: self.source.run(name).series())
        except KeyError:
            return Response("{}", 404, media_type="application/json")
        text = json.dumps(series, separators=(",", ":"), allow_nan=False)
        return Response(text, media_type="application/json", headers={"cache-control": "no-store"})

    async def _devices(self, request: Request) -> Response:
        query = _query(request)

        def render() -> str:
            rows = device_rows(self.source)
            states = sorted({row.state for row in rows})
            state = query.get("state", "")
            chosen = [row for row in rows if state in ("", row.state)]
            paging = Paging(number(query, "page"), len(chosen), "page")
            return self._page(
                "devices",
                "",
                self.source.version(""),
                rows=chosen[paging.first : paging.last],
                paging=paging,
                states={each: sum(row.state == each for row in rows) for each in states},
                state=state,
                total=len(rows),
                query=query,
            )

        return _html(await self._read(render))

    async def _events(self, request: Request) -> Response:
        name = request.query_params.get("run", "")
        if self.live.full:
            return Response(status_code=503, headers={"retry-after": "5"})
        if name and name not in await self._read(self.source.run_names):
            return Response(status_code=404)
        return StreamingResponse(
            self.live.stream(name),
            media_type="text/event-stream",
            headers={"cache-control": "no-store", "x-accel-buffering": "no"},
        )

    # -- errors ------------------------------------------------------------------------------------

    async def _missing(self, request: Request, error: Exception | None = None) -> Response:
        return self._message(404, "There is no such page", "It may have been removed.")

    async def _unreadable(self, request: Request, error: Exception) -> Response:
        log.debug("a page cannot be shown", exc_info=error)
        return self._message(500, "This cannot be shown now", str(error))

    def _message(self, status: int, title: str, text: str) -> Response:
        return _html(self._page("message", "", "", heading=title, text=text), status)

    def _page(self, template: str, name: str, version: str, **values: Any) -> str:
        return self.pages.render(
            template,
            source=self.source,
            live_run=name,
            live_version=version,
            **values,
        )


def _query(request: Request) -> Mapping[str, str]:
    if len(request.url.query) > MAX_QUERY:
        return {}
    return dict(request.query_params)


def _html(text: str, status: int = 200) -> Response:
    return HTMLResponse(text, status, {"cache-control": "no-store"})
