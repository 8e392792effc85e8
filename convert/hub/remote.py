"""A repository on the Hub, read in place by HTTP range requests: for questions that need no weights.

One request lists the files with their sizes and fixes the commit; after that each shard costs one request for
its first bytes (a few at a time), which usually hold the whole header. What was read is counted, and limited,
so that a question never turns into a download.
"""

import re
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import urljoin, urlsplit

from w4pack.convert.errors import HubError, SourceError
from w4pack.convert.files.tensorfile import Header, read_header
from w4pack.convert.hub.ahead import AT_ONCE, Likeness, Range
from w4pack.convert.hub.client import QUICK, hub_error, persist, session_tools, status_of
from w4pack.convert.hub.resolve import HubSource

T = TypeVar("T")

READ_LIMIT = 64_000_000  # bytes that a question may read unless asked to be thorough
HEAD_SMALL, HEAD_LARGE = 64 << 10, 256 << 10  # bytes of a shard's start that the first request asks for
SMALL_MODEL = 1 << 20  # bytes of all shards; one request each is the quickest way to any part of them
HEADER_LIMIT = 32 << 20  # bytes; a longer header is left to the reader to refuse
HEADS_TOTAL = 16 << 20  # bytes for the starts of all shards together
# bytes between ranges that are fetched as one: a request takes as long as some hundred kilobytes
GAPS = (256 << 10, 32 << 10, 0)
AMPLE = 4 << 20  # bytes that joining may add up to without a question
WHOLE_LIMIT = 16 << 20  # bytes that are read past to reach an offset, from a server without ranges
KEPT_LIMIT = 96 << 20  # bytes of fetched ranges that stay in memory
TIMEOUT = 20.0  # seconds without any byte; the client's own session waits for ever
THREADS = 8
REDIRECTS = 5

_SHARD = re.compile(r"(.*)-\d{5}-of-(\d{5})\.safetensors")


@dataclass(slots=True)
class _Spans:
    """Ranges of one file that were fetched and are kept."""

    parts: list[tuple[int, bytes]] = field(default_factory=list)

    def add(self, start: int, data: bytes) -> None:
        """Keep one more range; it grows the one that it continues."""
        for i, (at, before) in enumerate(self.parts):
            if at + len(before) == start:
                self.parts[i] = (at, before + data)
                return
        self.parts.append((start, data))

    def copy(self, offset: int, buffer: memoryview) -> bool:
        """Fill ``buffer`` if one kept range covers it."""
        for start, data in self.parts:
            if start <= offset and offset + len(buffer) <= start + len(data):
                buffer[:] = data[offset - start : offset - start + len(buffer)]
                return True
        return False


class HubBlob:
    """One file of a repository. Reads are range requests, unless a kept range has the bytes."""

    def __init__(self, store: "HubStore", name: str, size: int) -> None:
        self.name = name
        self.size = size
        self._store = store

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` from ``offset``. Raises SourceError past the end, HubError from the network."""
        self._store.read_range(self.name, offset, buffer)

    def close(self) -> None:
        """Do nothing: there is no open file."""


class HubStore:
    """The files of one model repository at one commit.

    limit     bytes that may be read in all
    thorough  no limit

    Safe to use from several threads. Raises HubError for whatever the Hub or the network says.
    """

    def __init__(self, source: HubSource, *, thorough: bool = False, limit: int = READ_LIMIT) -> None:
        self.label = source.label
        self.bytes_read = 0
        self.requests = 0
        self._limit = None if thorough else limit
        self._repo = source.repo_id
        self._lock = threading.Lock()
        self._spans: dict[str, _Spans] = {}
        self._kept = 0
        self._urls: dict[str, str] = {}  # file -> where the Hub sent us last; signed, so it may expire
        self._heads_asked: set[str] = set()
        self._likeness: Likeness | None = None
        self._sizes, self.commit = self._list(source)

    def files(self) -> Mapping[str, int]:
        """Names and sizes in bytes, as the Hub lists them."""
        return self._sizes

    @property
    def budget_left(self) -> int | None:
        """Bytes that may still be read; None: no limit."""
        return None if self._limit is None else max(0, self._limit - self.bytes_read)

    def read(self, name: str, limit: int) -> bytes:
        """Return a small file whole. Raises SourceError if it is missing or larger than ``limit`` bytes."""
        size = self._size(name)
        if size > limit:
            raise SourceError(
                "file is too large",
                code="file-too-large",
                where=f"{self.label}: {name}",
                expected=f"at most {limit:,} bytes",
                found=f"{size:,}",
            )
        data = bytearray(size)
        self.read_range(name, 0, memoryview(data))
        return bytes(data)

    def blob(self, name: str) -> HubBlob:
        """Open a file for reading at offsets. The first shard opened brings the starts of all its peers."""
        size = self._size(name)
        if name.endswith(".safetensors") and name not in self._heads_asked:
            self._fetch_heads(name)
        return HubBlob(self, name, size)

    def prefetch(self, ranges: Iterable[tuple[str, int, int]]) -> None:
        """Fetch (name, offset, length) ranges together: near ones as one request, several at a time.

        Later reads inside them cost nothing. Ranges beyond the end of a file are cut.
        """
        missing = [(name, at, length) for name, at, length in ranges if not self._has(name, at, at + length)]
        self._fetch_all(self._merged(missing))

    def read_range(self, name: str, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with the bytes of ``name`` from ``offset``."""
        buffer = buffer.cast("B") if buffer.format != "B" or buffer.ndim != 1 else buffer
        size = self._size(name)
        if offset < 0 or offset + len(buffer) > size:
            raise SourceError(
                "file ends too early",
                code="short-read",
                where=f"{self.label}: {name}",
                expected=f"{len(buffer):,} bytes at offset {offset:,}",
                found=f"{size:,} bytes in the file",
            )
        if self._copy(name, offset, buffer):
            return
        ahead = self._ahead(name, offset, len(buffer))
        if len(ahead) > 1:
            self.prefetch(ahead)
            if self._copy(name, offset, buffer):
                return
        buffer[:] = self._fetch(name, offset, offset + len(buffer))

    def _copy(self, name: str, offset: int, buffer: memoryview) -> bool:
        with self._lock:
            spans = self._spans.get(name)
            return not len(buffer) or (spans is not None and spans.copy(offset, buffer))

    def _ahead(self, name: str, offset: int, length: int) -> list[Range]:
        """Return what to fetch with this read, once all headers are here; see ``convert.hub.ahead``."""
        if name not in self._heads_asked or offset <= 8:
            return []
        if self._likeness is None:
            self._likeness = Likeness(self._headers())
        left = AT_ONCE if self.budget_left is None else self.budget_left // 2
        return self._likeness.after(name, offset, length, left)

    def _headers(self) -> dict[str, Header]:
        """Parse the headers that lie whole in what was fetched; broken ones are for the reader to report."""
        headers = {}
        for name in sorted(self._heads_asked):

            def kept(offset: int, length: int, name: str = name) -> bytes:
                data = bytearray(length)
                if not self._copy(name, offset, memoryview(data)):
                    raise SourceError("not here")
                return bytes(data)

            with suppress(SourceError):
                headers[name] = read_header(name, self._sizes[name], kept)
        return headers

    def close(self) -> None:
        """Forget what was kept. The session belongs to the client and stays open."""
        with self._lock:
            self._spans.clear()
            self._kept = 0

    def __enter__(self) -> "HubStore":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- what lies where

    def _list(self, source: HubSource) -> tuple[dict[str, int], str]:
        from huggingface_hub import HfApi

        def ask() -> Any:
            self.requests += 1
            return HfApi().model_info(
                source.repo_id, revision=source.revision, files_metadata=True, timeout=TIMEOUT
            )

        info = self._guarded(lambda: persist(ask, QUICK))
        sizes = {entry.rfilename: int(entry.size or 0) for entry in info.siblings or []}
        return sizes, str(info.sha or source.revision or "main")

    def _size(self, name: str) -> int:
        if name not in self._sizes:
            raise SourceError("no such file", code="missing-file", where=f"{self.label}: {name}")
        return self._sizes[name]

    def _fetch_heads(self, name: str) -> None:
        peers = self._peers(name)
        with self._lock:
            peers = [peer for peer in peers if peer not in self._heads_asked]
            self._heads_asked.update(peers)
        length = max(HEAD_SMALL, min(HEAD_LARGE, HEADS_TOTAL // max(1, len(peers))))
        if sum(self._sizes[peer] for peer in peers) <= SMALL_MODEL:
            length = SMALL_MODEL
        self.prefetch((peer, 0, length) for peer in peers)
        self._fetch_all([part for peer in peers if (part := self._rest_of_header(peer, length)) is not None])

    def _rest_of_header(self, name: str, got: int) -> Range | None:
        """Return what is missing of a header (file, start, end); None if it is whole, or absurd."""
        prefix = bytearray(8)
        if self._sizes[name] < 8 or not self._copy(name, 0, memoryview(prefix)):
            return None
        end = 8 + int.from_bytes(prefix, "little")
        return (name, got, end) if got < end <= min(self._sizes[name], HEADER_LIMIT) else None

    def _peers(self, name: str) -> list[str]:
        """Return the shards that share ``name``'s stem and count, itself among them."""
        match = _SHARD.fullmatch(name)
        if match is None:
            return [name]
        key = match.groups()
        return [other for other in self._sizes if (m := _SHARD.fullmatch(other)) and m.groups() == key]

    def _merged(self, ranges: Iterable[Range]) -> list[Range]:
        """Return (name, start, end), sorted, near ranges joined: the wider the better, in reason."""
        cut = [(name, max(0, at), min(at + length, self._size(name))) for name, at, length in ranges]
        parts = sorted(part for part in cut if part[1] < part[2])
        wanted = sum(end - start for _, start, end in parts)
        reason = max(2 * wanted, AMPLE)
        if self.budget_left is not None:
            reason = min(reason, max(wanted, self.budget_left // 2))
        joined = parts
        for gap in GAPS:
            joined = _join(parts, gap)
            if sum(end - start for _, start, end in joined) <= reason:
                break
        return joined

    def _has(self, name: str, start: int, end: int) -> bool:
        with self._lock:
            spans = self._spans.get(name)
            return spans is not None and any(
                at <= start and end <= at + len(data) for at, data in spans.parts
            )

    def _fetch_all(self, wanted: list[tuple[str, int, int]]) -> None:
        if len(wanted) <= 1:
            for part in wanted:
                self._fetch_kept(part)
            return
        with ThreadPoolExecutor(min(THREADS, len(wanted))) as pool:
            futures = [pool.submit(self._fetch_kept, part) for part in wanted]
            try:
                for future in futures:
                    future.result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _fetch_kept(self, part: tuple[str, int, int]) -> None:
        name, start, end = part
        data = self._fetch(name, start, end)
        with self._lock:
            if self._kept + len(data) > KEPT_LIMIT:
                self._spans.clear()
                self._kept = 0
            self._spans.setdefault(name, _Spans()).add(start, data)
            self._kept += len(data)

    # -- the network

    def _fetch(self, name: str, start: int, end: int) -> bytes:
        self._spend(name, end - start)
        return self._guarded(lambda: persist(lambda: self._request(name, start, end), QUICK))

    def _guarded(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except SourceError:
            raise
        except Exception as err:
            raise hub_error(err, self.label) from err

    def _spend(self, name: str, count: int) -> None:
        with self._lock:
            if self._limit is not None and self.bytes_read + count > self._limit:
                raise HubError(
                    "the answer needs more bytes than a question may read",
                    code="read-limit",
                    where=f"{self.label}: {name}",
                    expected=f"at most {self._limit:,} bytes in all",
                    found=f"{self.bytes_read:,} read, {count:,} more asked for",
                    hint="pass `--thorough` to lift the limit",
                )
            self.bytes_read += count

    def _request(self, name: str, start: int, end: int) -> bytes:
        """Send one range request, to the last known address if there is one, and return exactly its bytes."""
        known = self._urls.get(name)
        if known is not None:
            try:
                return self._get(name, known, start, end)
            except Exception as err:
                if status_of(err) not in (400, 401, 403, 404, 410):
                    raise
                with suppress(
                    KeyError
                ):  # a signed address that has expired; another thread may have dropped it
                    del self._urls[name]
        from huggingface_hub import hf_hub_url

        return self._get(name, hf_hub_url(self._repo, name, revision=self.commit), start, end)

    def _get(self, name: str, url: str, start: int, end: int) -> bytes:
        """Follow redirects by hand: the access token goes to the Hub's own address only."""
        tools = session_tools()
        headers = tools.build_hf_headers()
        for _ in range(REDIRECTS):
            sent = (
                dict(headers)
                if _is_hub(url)
                else {k: v for k, v in headers.items() if k.lower() != "authorization"}
            )
            sent |= {"Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"}
            with self._lock:
                self.requests += 1
            with tools.get_session().stream(
                "GET", url, headers=sent, timeout=TIMEOUT, follow_redirects=False
            ) as response:
                if 300 <= response.status_code < 400 and "location" in response.headers:
                    url = urljoin(url, response.headers["location"])
                    continue
                tools.hf_raise_for_status(response)
                data = _body(response, start, end)
            if len(data) != end - start:
                raise SourceError(
                    "file ends too early",
                    code="short-read",
                    where=f"{self.label}: {name}",
                    expected=f"{end - start:,} bytes at offset {start:,}",
                    found=f"{len(data):,}",
                )
            self._urls[name] = url
            return data
        raise HubError(
            "too many redirects", code="redirects", where=f"{self.label}: {name}", found=urlsplit(url).netloc
        )


def _join(parts: Iterable[Range], gap: int) -> list[Range]:
    """Join sorted (name, start, end) ranges of one file that lie at most ``gap`` bytes apart."""
    joined: list[Range] = []
    for name, start, end in parts:
        if joined and joined[-1][0] == name and start - joined[-1][2] <= gap:
            joined[-1] = (name, joined[-1][1], max(end, joined[-1][2]))
        else:
            joined.append((name, start, end))
    return joined


def _body(response: Any, start: int, end: int) -> bytes:
    """Read the bytes ``start`` to ``end`` from an answer that may also be the whole file, and no more."""
    skip = 0 if response.status_code == 206 else start
    if skip > WHOLE_LIMIT:
        raise HubError(
            "the server does not answer range requests",
            code="no-ranges",
            where=urlsplit(str(response.url)).netloc,
            hint="download the model, then pass its folder",
        )
    got = bytearray()
    for chunk in response.iter_bytes(1 << 16):
        got += chunk
        if len(got) >= skip + end - start:
            break
    return bytes(got[skip : skip + end - start])


def _is_hub(url: str) -> bool:
    from huggingface_hub import constants

    return _origin(url) == _origin(constants.ENDPOINT)


def _origin(url: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or {"http": 80, "https": 443}.get(parts.scheme)
