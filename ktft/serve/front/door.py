"""Who may come in: the host that a request names, the web page that it comes from, the key that it has.

A browser sends requests of any page to any address, this machine's included, and says where a page is from (`Origin`).
Whoever owns a name can let it resolve to this machine's address, which makes his pages' requests look like the
server's own; but they still name that host (`Host`).
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import urlsplit

from ktft.serve.front.requests import Message, Refusal, Scope, Send, header, path_of

OPEN = ("/health", "/ping")
"""Paths without a key: whether the server lives."""

ADMIN = (
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/abort_requests",
    "/start_profile",
    "/stop_profile",
)
"""Paths that change what everybody gets."""

LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")
_BEARER = "give the server's API key as `Authorization: Bearer KEY`"


def is_loopback(host: str) -> bool:
    """Whether an address to listen at is this machine's own, which no other machine reaches."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@dataclass(frozen=True)
class Door:
    """What a request is let in by.

    Attributes:
        hosts: names of this server that a request may give; any, if there are none.
        origins: of web pages whose requests are answered, besides the server's own; `*` is any.
        key: of its users, None if they need none.
        admin_key: for paths of `ADMIN`, good for all else too; None lets users take them.
    """

    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    key: str | None = None
    admin_key: str | None = None

    def let_in(self, scope: Scope) -> Scope:
        """The request as vLLM is to see it: with the key of users, which vLLM asks for again.

        Raises:
            Refusal: 403 or 401.
        """
        self._check_host(scope)
        self._check_origin(scope)
        if scope["method"] == "OPTIONS":  # browsers ask by it what a page may do, without a key
            return scope
        self._check_key(scope)
        if self.key is None:
            return scope
        others = [pair for pair in scope["headers"] if pair[0] != b"authorization"]
        return {**scope, "headers": [*others, (b"authorization", f"Bearer {self.key}".encode())]}

    def _check_host(self, scope: Scope) -> None:
        given = header(scope, b"host")
        if not self.hosts or not given:  # no browser leaves it out
            return
        try:
            name = urlsplit(f"//{given}").hostname or ""
        except ValueError:
            name = ""
        if name not in self.hosts:
            raise Refusal(
                403,
                f"the request is for host {given!r}; this server is {', '.join(self.hosts)}. If a proxy of yours asks "
                f"by that name, start the server with --allowed-host {name or 'NAME'}",
            )

    def _check_origin(self, scope: Scope) -> None:
        origin = self._other_origin(scope)
        if origin and not self._allows(origin):
            raise Refusal(
                403,
                f"a web page of {origin} may not use this server; to let it, start the server with "
                f"-- --allowed-origins '{json.dumps([origin])}'",
            )

    def _allows(self, origin: str) -> bool:
        return "*" in self.origins or origin in self.origins

    @staticmethod
    def _other_origin(scope: Scope) -> str:
        """Of the web page that a request comes from; empty if it is no page's, or this server's own."""
        origin = header(scope, b"origin")
        own = origin.partition("://")[2].lower() == header(scope, b"host").lower() != ""
        return "" if own else origin

    def _check_key(self, scope: Scope) -> None:
        path = path_of(scope).rstrip("/")
        admin = path in ADMIN and self.admin_key is not None
        if path in OPEN or not (self.key or admin):
            return
        scheme, _, given = header(scope, b"authorization").partition(" ")
        if not given:  # as Anthropic's client sends it
            scheme, given = "bearer", header(scope, b"x-api-key")
        if scheme.lower() != "bearer":
            raise Refusal(401, _BEARER)
        is_user, is_admin = _equal(given, self.key), _equal(given, self.admin_key)
        if admin and not is_admin:
            text = f"{path} changes what everybody gets; give the server's admin key as `Authorization: Bearer KEY`"
            raise Refusal(403 if is_user else 401, text)
        if not (is_user or is_admin):
            raise Refusal(401, _BEARER)

    def answering(self, scope: Scope, send: Send) -> Send:
        """A `send` that lets an allowed page of another origin read what comes from before vLLM's server."""
        origin = self._other_origin(scope)
        if not origin or not self._allows(origin):
            return send

        async def readable(message: Message) -> None:
            if message["type"] == "http.response.start":
                names = {name.lower() for name, _ in message["headers"]}
                if b"access-control-allow-origin" not in names:
                    pairs = ((b"access-control-allow-origin", origin.encode("latin-1")), (b"vary", b"Origin"))
                    message = {**message, "headers": [*message["headers"], *pairs]}
            await send(message)

        return readable


def _equal(given: str, key: str | None) -> bool:
    """Compared in a time that tells nothing."""
    digests = (hashlib.sha256((each or "").encode()).digest() for each in (given, key))
    return secrets.compare_digest(*digests) and key is not None


def names_of(host: str, allowed: Iterable[str]) -> tuple[str, ...]:
    """`Door.hosts` of a server that listens at `host`, with further names; none where any is good.

    Only on addresses that no other machine reaches are all names known.
    """
    further = tuple(name.lower() for name in allowed)
    if not further and not is_loopback(host):
        return ()
    return tuple(dict.fromkeys((*LOCAL_NAMES, host.lower(), *further)))
