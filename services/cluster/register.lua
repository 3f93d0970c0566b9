-- Makes a worker known, in place of an older incarnation at the same address.
-- KEYS: diptych:workers, diptych:worker:<incarnation>
-- ARGV: address, incarnation, record, TTL of the record in ms, TTL of the index in ms, prefix of record keys, channel
-- Returns the incarnation that was replaced, or ''.
local old = redis.call('HGET', KEYS[1], ARGV[1])
if old and old ~= ARGV[2] then
  redis.call('DEL', ARGV[6] .. old)
else
  old = ''
end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('PEXPIRE', KEYS[1], ARGV[5])
redis.call('SET', KEYS[2], ARGV[3], 'PX', ARGV[4])
redis.call('PUBLISH', ARGV[7], '')
return old
