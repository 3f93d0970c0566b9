-- Forgets a worker; does nothing to another incarnation at the same address.
-- KEYS: diptych:workers, diptych:worker:<incarnation>
-- ARGV: address, incarnation, channel
if redis.call('HGET', KEYS[1], ARGV[1]) == ARGV[2] then
  redis.call('HDEL', KEYS[1], ARGV[1])
end
if redis.call('DEL', KEYS[2]) == 1 then
  redis.call('PUBLISH', ARGV[3], '')
end
return ''
