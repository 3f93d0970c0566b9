-- The lines of waiting requests and what is placed on whom; one step of it, atomically.
-- KEYS: 1 line  2 alive  3 owner  4 sequence  5 placed  6 expiry  7 load  8 recent     (see keys.py)
-- ARGV: channel, operation, the operation's own arguments
-- Operations and their replies stand beside each function below. Durations in ms. Every operation first drops waiters
-- that are dead and placements that have expired, and is safe to repeat.
local LINE, ALIVE, OWNER, SEQUENCE = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local PLACED, EXPIRY, LOAD, RECENT = KEYS[5], KEYS[6], KEYS[7], KEYS[8]
local RECENT_MS, RECENT_STEP_MS, PRUNE_AT_ONCE = 3000, 100, 100
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local changed = false

local function leave_line(request)
  if redis.call('ZREM', LINE, request) == 1 then
    changed = true
  end
  redis.call('ZREM', ALIVE, request)
  redis.call('HDEL', OWNER, request)
end

local function unplace(request)
  local text = redis.call('HGET', PLACED, request)
  redis.call('ZREM', EXPIRY, request)
  if not text then
    return nil
  end
  local entry = cjson.decode(text)
  redis.call('HDEL', PLACED, request)
  if redis.call('HINCRBY', LOAD, entry.decode, -entry.tokens) <= 0 then
    redis.call('HDEL', LOAD, entry.decode)
  end
  changed = true
  return entry
end

local function prune()
  for _, request in ipairs(redis.call('ZRANGEBYSCORE', ALIVE, '-inf', now, 'LIMIT', 0, PRUNE_AT_ONCE)) do
    leave_line(request)
  end
  for _, request in ipairs(redis.call('ZRANGEBYSCORE', EXPIRY, '-inf', now, 'LIMIT', 0, PRUNE_AT_ONCE)) do
    unplace(request)
  end
end

-- As JSON, for a client reads a nested reply element by element:
-- {head: '' when nobody waits, length, load: {decode incarnation: tokens}, recent: {prefill incarnation: [[tokens, ms
-- ago], …]}}. Its size does not depend on how many requests come.
local function state()
  local load, recent = {}, {}
  local entries = redis.call('HGETALL', LOAD)
  for i = 1, #entries, 2 do
    load[entries[i]] = tonumber(entries[i + 1])
  end
  entries = redis.call('HGETALL', RECENT)
  for i = 1, #entries, 2 do
    local prefill, at = string.match(entries[i], '^(%S+) (%d+)$')
    local ago = now - tonumber(at)
    if ago > RECENT_MS then
      redis.call('HDEL', RECENT, entries[i])
    else
      recent[prefill] = recent[prefill] or {}
      table.insert(recent[prefill], { tonumber(entries[i + 1]), math.max(0, ago) })
    end
  end
  local head = redis.call('ZRANGE', LINE, 0, 0)[1] or ''
  return cjson.encode({ head = head, length = redis.call('ZCARD', LINE), load = load, recent = recent })
end

local operations = {}

-- request, attempt, call, ms to live, limit of the line
-- → {'placed', answer}: this attempt was placed before   {'stale'}: a later one was   {'full', length}
--   {'waiting', state}: in line, owned by `call` from now on
-- A request that was placed before keeps the place in line that it had then.
function operations.enqueue(request, attempt, call, live_ms, limit)
  local place = nil
  local text = redis.call('HGET', PLACED, request)
  if text then
    local entry = cjson.decode(text)
    if entry.attempt == tonumber(attempt) then
      return { 'placed', entry.answer }
    elseif entry.attempt > tonumber(attempt) then
      return { 'stale' }
    end
    place = entry.place
    unplace(request)
  end
  if not redis.call('ZSCORE', LINE, request) then
    local length = redis.call('ZCARD', LINE)
    if length >= tonumber(limit) then
      return { 'full', length }
    end
    redis.call('ZADD', LINE, place or redis.call('INCR', SEQUENCE), request)
  end
  redis.call('ZADD', ALIVE, now + live_ms, request)
  redis.call('HSET', OWNER, request, call)
  return { 'waiting', state() }
end

-- ms to live, requests…
-- → {state, {requests that are not in line}}; the others live on
function operations.refresh(live_ms, ...)
  local gone = {}
  for _, request in ipairs({ ... }) do
    if redis.call('ZSCORE', LINE, request) then
      redis.call('ZADD', ALIVE, now + live_ms, request)
    else
      gone[#gone + 1] = request
    end
  end
  return { state(), gone }
end

-- request, attempt, decode incarnation, tokens, bound, prefill incarnation or '', prompt tokens, ms to live, answer
-- → {'placed', answer}   {'waiting', state}: not the head, or no room under the bound   {'gone'}: not in line
function operations.admit(request, attempt, decode, tokens, bound, prefill, prompt_tokens, live_ms, answer)
  local place = redis.call('ZSCORE', LINE, request)
  if not place then
    return { 'gone' }
  end
  local load = tonumber(redis.call('HGET', LOAD, decode) or '0')
  local head = redis.call('ZRANGE', LINE, 0, 0)[1]
  if head ~= request or (load > 0 and load + tokens > tonumber(bound)) then
    return { 'waiting', state() }
  end
  leave_line(request)
  unplace(request)
  local entry = { attempt = tonumber(attempt), decode = decode, tokens = tonumber(tokens), place = tonumber(place) }
  entry.answer, entry.at = answer, now
  redis.call('HSET', PLACED, request, cjson.encode(entry))
  redis.call('ZADD', EXPIRY, now + live_ms, request)
  redis.call('HINCRBY', LOAD, decode, tokens)
  if prefill ~= '' then
    -- up: prompts are better counted a moment too long than not at all
    local at = math.ceil(now / RECENT_STEP_MS) * RECENT_STEP_MS
    redis.call('HINCRBY', RECENT, string.format('%s %.0f', prefill, at), prompt_tokens)
    redis.call('PEXPIRE', RECENT, RECENT_MS)
  end
  return { 'placed', answer }
end

-- request, answer or '' → {'finished'}; with an answer, only the placement that was recorded with it
function operations.finish(request, answer)
  local text = redis.call('HGET', PLACED, request)
  if text and (answer == '' or cjson.decode(text).answer == answer) then
    unplace(request)
  end
  return { 'finished' }
end

-- request, call → {'left'}; only the call that waits takes the request out of the line
function operations.leave(request, call)
  if redis.call('HGET', OWNER, request) == call then
    leave_line(request)
  end
  return { 'left' }
end

-- ms, decode incarnations… → {number}: forgets what was placed on them longer ago than that
function operations.forget(older_ms, ...)
  local on = {}
  for _, incarnation in ipairs({ ... }) do
    on[incarnation] = true
  end
  local count = 0
  local placed = redis.call('HGETALL', PLACED)
  for i = 1, #placed, 2 do
    local entry = cjson.decode(placed[i + 1])
    if on[entry.decode] and entry.at <= now - older_ms then
      unplace(placed[i])
      count = count + 1
    end
  end
  return { count }
end

prune()
local reply = operations[ARGV[2]](unpack(ARGV, 3))
if changed then
  redis.call('PUBLISH', ARGV[1], '')
end
return reply
