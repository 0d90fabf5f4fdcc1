"""The table of a fleet in Redis or Valkey: a hash, changed by one script. Presence is a subscription (`link.py`)."""

from hashlib import sha1
from typing import Final

from hiredis import ReplyError

from gateway.features.coordination.link import RedisLink
from gateway.features.coordination.store import Stamp, StoreLost, Table, TableChange

_READ = Stamp("", "")  # no table is like this: nothing is changed
# The table of a former run is read as empty. INFO names the run, which a restart or a failover changes; the script
# uses no clock. The hash expires a day after the last gateway has gone.
_SCRIPT = """
local key, prefix, me = KEYS[1], ARGV[1], ARGV[2]
local run = string.match(redis.call('INFO', 'server'), 'run_id:(%w+)')
local is_same = redis.call('HGET', key, ':run') == run
if redis.call('HLEN', key) > 1000 then return redis.error_reply('ERR the table has more than 1000 fields') end
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
DIGEST: Final = sha1(_SCRIPT.encode(), usedforsecurity=False).hexdigest()  # the server's name for the script


class RedisStore:
    """The table of the fleet for the replica of this link."""

    def __init__(self, link: RedisLink) -> None:
        self._link = link
        self._table, self._here = link.name("table"), link.name("here:")

    async def read(self) -> Table:
        return await self._run(*_READ, "", 0, 0)

    async def swap(self, change: TableChange) -> tuple[bool, Table]:
        records = [each for pair in change.records.items() for each in pair]
        words = [change.version, int(change.settled), len(change.records), *records, *change.removed]
        table = await self._run(*change.expected, *words)
        return table.stamp.version == change.version, table  # independent of which call was answered

    async def _run(self, *arguments: str | bytes | int) -> Table:
        words = 1, self._table, self._here, self._link.replica, *arguments
        reply = await self._link.ask("EVALSHA", DIGEST, *words)
        if isinstance(reply, ReplyError):  # it has not seen the script yet
            reply = await self._link.ask("EVAL", _SCRIPT, *words)
        try:
            run, version, fields, present = reply
            records = {_text(key): value for key, value in zip(fields[::2], fields[1::2], strict=True)}
            settled, era = records.pop(":settled", b"0") == b"1", _text(records.pop(":era", b""))
            own, here = Stamp(_text(run), _text(version)), frozenset(map(_text, present))
        except (AttributeError, TypeError, ValueError) as error:
            raise StoreLost(f"not an answer of the table: {str(reply)[:100]}") from error
        self._link.seen_present(is_present=self._link.replica in here)
        found = {key: value for key, value in records.items() if not key.startswith(":")}
        return Table(own, era, settled, records=found, present=here)


def _text(name: bytes) -> str:
    """A name in the table; no replica's has bytes that are not UTF-8."""
    return name.decode(errors="backslashreplace")
