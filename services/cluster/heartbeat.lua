-- Refreshes a worker's record.
-- KEYS: diptych:workers, diptych:worker:<incarnation>
-- ARGV: address, incarnation, record, TTL of the record in ms, TTL of the index in ms, prefix of record keys,
--       channel to tell ('' for none)
-- Returns 'kept'; 'missing' when the record is not there (register again); 'replaced' when another incarnation lives
-- at the address.
local current = redis.call('HGET', KEYS[1], ARGV[1])
if current and current ~= ARGV[2] and redis.call('EXISTS', ARGV[6] .. current) == 1 then
  return 'replaced'
end
if current ~= ARGV[2] or redis.call('EXISTS', KEYS[2]) == 0 then
  return 'missing'
end
redis.call('PEXPIRE', KEYS[1], ARGV[5])
redis.call('SET', KEYS[2], ARGV[3], 'PX', ARGV[4])
if ARGV[7] ~= '' then
  redis.call('PUBLISH', ARGV[7], '')
end
return 'kept'
