-- Lists live workers and drops dead ones from the index.
-- KEYS: diptych:workers
-- ARGV: prefix of record keys, TTL of a fresh record in ms
-- Returns record, ms since its heartbeat, record, ms, …
local reply = {}
local index = redis.call('HGETALL', KEYS[1])
for i = 1, #index, 2 do
  local key = ARGV[1] .. index[i + 1]
  local record = redis.call('GET', key)
  if record then
    reply[#reply + 1] = record
    reply[#reply + 1] = math.max(0, tonumber(ARGV[2]) - redis.call('PTTL', key))
  else
    redis.call('HDEL', KEYS[1], index[i])
  end
end
return reply
