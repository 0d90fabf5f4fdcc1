"""A name server on loopback that answers what a test says."""

import asyncio
from collections.abc import Sequence
from types import TracebackType
from typing import Self, cast

import dns.flags
import dns.message
import dns.rcode
import dns.rdatatype
import dns.rrset


class NameServer(asyncio.DatagramProtocol):
    """`records` has the values by name and type; without any, the answer has none. `rcode`: of all answers."""

    def __init__(self) -> None:
        self.records: dict[tuple[str, str], Sequence[str]] = {}
        self.ttl_seconds = 0
        self.rcode = dns.rcode.NOERROR
        self.asked: list[tuple[str, str]] = []
        self._transport: asyncio.DatagramTransport | None = None

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_datagram_endpoint(lambda: self, local_addr=("127.0.0.1", 0))
        self._transport = cast(asyncio.DatagramTransport, transport)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._transport is not None
        self._transport.close()

    @property
    def address(self) -> str:
        """For `discovery.dns[].nameserver`."""
        assert self._transport is not None
        return f"127.0.0.1:{self._transport.get_extra_info('sockname')[1]}"

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        """Answer a question."""
        query = dns.message.from_wire(data)
        [question] = query.question
        kind = dns.rdatatype.to_text(question.rdtype)
        name = question.name.to_text(omit_final_dot=True)
        self.asked.append((name, kind))
        answer = dns.message.make_response(query)
        answer.flags |= dns.flags.RA | dns.flags.AA
        answer.set_rcode(self.rcode)
        values = self.records.get((name, kind), ())
        if values and self.rcode == dns.rcode.NOERROR:
            answer.answer.append(dns.rrset.from_text(question.name, self.ttl_seconds, "IN", kind, *values))
        assert self._transport is not None
        self._transport.sendto(answer.to_wire(), addr)
