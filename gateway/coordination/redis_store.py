"""The table of a fleet in Redis or Valkey: a hash, changed by one script, and a connection that shows presence."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

from gateway.config.coordination import CoordinationConfig
from gateway.coordination.redis_client import CALL_SECONDS, heed_cancellation, new_client, shared_name
from gateway.coordination.store import Stamp, StoreLost, Table, TableChange
from gateway.supervisor import Supervisor

_RETRY_SECONDS = 0.25
_READ = Stamp("", "")  # no table is like this: nothing is changed
# The table of a former run is read as empty. INFO names the run, which a restart or a failover changes; the script
# uses no clock. The hash expires a day after the last gateway has gone.
_SCRIPT = """
local key, prefix, me = KEYS[1], ARGV[1], ARGV[2]
local run = string.match(redis.call('INFO', 'server'), 'run_id:(%w+)')
local is_same = redis.call('HGET', key, ':run') == run
local version = is_same and redis.call('HGET', key, ':version') or ''
if ARGV[3] == run and ARGV[4] == version then
  if not is_same then redis.call('DEL', key) end
  local count, at = tonumber(ARGV[7]), 8
  for _ = 1, count do
    redis.call('HSET', key, ARGV[at], ARGV[at + 1])
    at = at + 2
  end
  while at <= #ARGV do
    redis.call('HDEL', key, ARGV[at])
    at = at + 1
  end
  if not is_same then redis.call('HSET', key, ':era', ARGV[5]) end
  redis.call('HSET', key, ':run', run, ':version', ARGV[5], ':settled', ARGV[6])
  version, is_same = ARGV[5], true
  redis.call('PEXPIRE', key, 86400000)
end
local fields = is_same and redis.call('HGETALL', key) or {}
local names, channels = {me}, {prefix .. me}
for i = 1, #fields, 2 do
  if string.sub(fields[i], 1, 1) ~= ':' and fields[i] ~= me then
    names[#names + 1], channels[#channels + 1] = fields[i], prefix .. fields[i]
  end
end
local subscribed, present = redis.call('PUBSUB', 'NUMSUB', unpack(channels)), {}
for i = 1, #names do
  if tonumber(subscribed[2 * i]) > 0 then present[#present + 1] = names[i] end
end
return {run, version, fields, present}
"""


class RedisStore:
    """The table of the fleet for one replica, named `replica`. `called`: what to do when another replica calls."""

    def __init__(
        self,
        config: CoordinationConfig,
        replica: str,
        called: Callable[[], None],
        supervisor: Supervisor,
    ) -> None:
        self._channel = partial(shared_name, config)
        self._replica, self._called = replica, called
        self._supervisor = supervisor
        self._client = new_client(config, f"{config.name}:{replica}", answer_seconds=CALL_SECONDS)
        self._presence = new_client(config, f"{config.name}:{replica}:presence")
        self._script = self._client.register_script(_SCRIPT)
        self._is_subscribed = asyncio.Event()
        self._renewal = asyncio.Event()

    @asynccontextmanager
    async def present(self) -> AsyncIterator[None]:
        """Show presence, and listen for calls of others, while the block runs. Closes all connections at its end."""
        try:
            async with self._supervisor.repeating("presence", self._subscribe, _RETRY_SECONDS):
                yield
        finally:
            for client in (self._presence, self._client):
                with suppress(OSError):
                    await client.aclose()

    async def _subscribe(self) -> None:
        """Hold one subscription until it fails, or until it has to be renewed."""
        from redis.exceptions import RedisError

        self._renewal.clear()
        try:
            async with self._presence.pubsub() as pubsub:
                await pubsub.subscribe(self._channel("here:") + self._replica, self._channel("call"))
                heed_cancellation()
                reading = asyncio.get_running_loop().create_task(self._listen(pubsub))
                renewal = asyncio.get_running_loop().create_task(self._renewal.wait())
                try:
                    await asyncio.wait([reading, renewal], return_when=asyncio.FIRST_COMPLETED)
                finally:
                    reading.cancel()
                    renewal.cancel()
                    await asyncio.gather(reading, renewal, return_exceptions=True)
        except (RedisError, OSError):
            await asyncio.sleep(_RETRY_SECONDS)
        finally:
            self._is_subscribed.clear()

    async def _listen(self, pubsub: Any) -> None:
        async for message in pubsub.listen():
            if message["type"] == "message":
                self._called()
            else:
                self._is_subscribed.set()

    async def show(self) -> None:
        """Wait until presence is shown, as far as this replica knows."""
        await self._is_subscribed.wait()

    async def read(self) -> Table:
        return await self._run([*_READ, "", 0, 0])

    async def swap(self, change: TableChange) -> tuple[bool, Table]:
        records = [each for pair in change.records.items() for each in pair]
        count = len(change.records)
        table = await self._run(
            [*change.expected, change.version, int(change.settled), count, *records, *change.removed]
        )
        return table.stamp.version == change.version, table  # whatever call was answered

    async def call_others(self) -> None:
        await self._guarded(lambda: self._client.publish(self._channel("call"), self._replica))

    async def _run(self, arguments: Sequence[Any]) -> Table:
        keys, given = (
            [self._channel("table")],
            [self._channel("here:"), self._replica, *arguments],
        )
        run, version, fields, present = await self._guarded(lambda: self._script(keys=keys, args=given))
        records = {key.decode(): value for key, value in zip(fields[::2], fields[1::2], strict=True)}
        settled, era = records.pop(":settled", b"0") == b"1", records.pop(":era", b"").decode()
        here = frozenset(each.decode() for each in present)
        if self._replica not in here and self._is_subscribed.is_set():
            self._renewal.set()  # the server has closed that connection, which this end does not know
        table = Table(
            Stamp(run.decode(), version.decode()),
            era,
            settled,
            {key: value for key, value in records.items() if not key.startswith(":")},
            here,
        )
        return table

    async def _guarded(self, call: Callable[[], Any]) -> Any:
        from redis.exceptions import RedisError

        try:
            async with asyncio.timeout(CALL_SECONDS):
                done = await call()
            heed_cancellation()
            return done
        except (RedisError, OSError) as error:  # TimeoutError is one, too
            raise StoreLost(f"{type(error).__name__}: {error}".rstrip(": ")) from error
