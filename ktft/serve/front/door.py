"""Which requests are let in, by the host that they name, the web page that sends them, and the key that they give.

A browser sends the requests of any page to any address, this machine's included, and says where the page is from
(`Origin`). The owner of a name can have it resolve to this machine's address, so that requests of pages at that name
look like those of the server's own pages; but they still name that host (`Host`).
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import urlsplit

from ktft.serve.front.asgi import Message, Refusal, Scope, Send, header, path_of

OPEN = ("/health", "/ping")
"""Paths that need no key: they say whether the server lives."""

LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")
_BEARER = "give the server's API key as `Authorization: Bearer KEY`"


def is_loopback(host: str) -> bool:
    """Whether no other machine can reach a server that listens at this address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@dataclass(frozen=True)
class Door:
    """The conditions under which a request is let in.

    Attributes:
        hosts: names of this server that a request may give; empty lets it give any.
        origins: the web pages, besides the server's own, whose requests are answered; `*` stands for all.
        key: the key that users must give; None asks for none.
        admin_key: the key for `admin_paths`, with which all else is open, too; None lets users take these paths.
        admin_paths: the paths that change what every user gets.
    """

    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    key: str | None = None
    admin_key: str | None = None
    admin_paths: tuple[str, ...] = ()

    def let_in(self, scope: Scope) -> Scope:
        """The request as the engine is to see it: with the key of users, for which it may ask again. Raises Refusal."""
        self._check_host(scope)
        self._check_origin(scope)
        if scope["method"] == "OPTIONS":  # a browser asks what a page may do, without a key
            return scope
        self._check_key(scope)
        if self.key is None:
            return scope
        others = [pair for pair in scope["headers"] if pair[0] != b"authorization"]
        return {**scope, "headers": [*others, (b"authorization", f"Bearer {self.key}".encode())]}

    def _check_host(self, scope: Scope) -> None:
        given = header(scope, b"host")
        if not self.hosts or not given:  # every browser names a host
            return
        try:
            name = urlsplit(f"//{given}").hostname or ""
        except ValueError:
            name = ""
        if name not in self.hosts:
            raise Refusal(
                403,
                f"the request is for host {given!r}; this server is {', '.join(self.hosts)}. If a proxy of yours uses "
                f"that name, start the server with --allowed-host {name or 'NAME'}",
            )

    def _check_origin(self, scope: Scope) -> None:
        origin = self._other_origin(scope)
        if origin and not self._allows(origin):
            raise Refusal(
                403,
                f"a web page of {origin} may not use this server; to allow it, start the server with "
                f"-- --allowed-origins '{json.dumps([origin])}'",
            )

    def _allows(self, origin: str) -> bool:
        return "*" in self.origins or origin in self.origins

    @staticmethod
    def _other_origin(scope: Scope) -> str:
        """The origin of the web page that sends a request; empty if no page does, or one of this server."""
        origin = header(scope, b"origin")
        own = origin.partition("://")[2].lower() == header(scope, b"host").lower() != ""
        return "" if own else origin

    def _check_key(self, scope: Scope) -> None:
        path = path_of(scope).rstrip("/")
        admin = path in self.admin_paths and self.admin_key is not None
        if path in OPEN or not (self.key or admin):
            return
        scheme, _, given = header(scope, b"authorization").partition(" ")
        if not given:  # Anthropic's client sends its key in this header
            scheme, given = "bearer", header(scope, b"x-api-key")
        if scheme.lower() != "bearer":
            raise Refusal(401, _BEARER)
        is_user, is_admin = _equal(given, self.key), _equal(given, self.admin_key)
        if admin and not is_admin:
            text = f"{path} changes what every user gets; give the server's admin key as `Authorization: Bearer KEY`"
            raise Refusal(403 if is_user else 401, text)
        if not (is_user or is_admin):
            raise Refusal(401, _BEARER)

    def answering(self, scope: Scope, send: Send) -> Send:
        """A `send` that lets an allowed page of another origin read the gate's own answers."""
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
    """Whether a given key is right. The time that this takes does not depend on the keys."""
    digests = (hashlib.sha256((each or "").encode()).digest() for each in (given, key))
    return secrets.compare_digest(*digests) and key is not None


def names_of(host: str, allowed: Iterable[str]) -> tuple[str, ...]:
    """The value of `Door.hosts` for a server that listens at `host` and has these further names.

    It is empty, so that any name is good, if other machines can reach the address and no names were given: then nobody
    knows all of the server's names.
    """
    further = tuple(name.lower() for name in allowed)
    if not further and not is_loopback(host):
        return ()
    return tuple(dict.fromkeys((*LOCAL_NAMES, host.lower(), *further)))
