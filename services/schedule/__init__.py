"""Whose turn it is, and whose KV is where: plain objects, the same in decode, in prefill and in simulation.

    policy     the interface: `Job` in, keys out; `Change` for what is worth a log line; `Next` for what swaps look at
    catalog    policies by name: `policy_named("mlfq", step_s=…, starvation_s=…)`
      fcfs, priority, srpt, shortest
                              one order over all requests (`ordered`)
      mlfq                    skip-join feedback queues; without the skip it is mlfq-naive; the bound on waiting
      auto                    fcfs (shortest for prompts) or mlfq, by what it observes (`gain`)
    ladder     quanta of levels, estimated next scheduled times
    shares     tenants: who is behind, and who is next inside a level
    ranked     a queue by rank, due: a queue by time; what a step costs
    swap       who leaves the device and who comes back; swap_view: seen from what; budget: within which bandwidth, and
               what stays free

How a worker drives it, between two steps, on one thread, with its own monotonic clock:

    policy.arrive(Job(...), now_s)            once its KV is here, or (aggregated, prefill) when it is submitted;
                                              `first_step_s`: the prefill's predicted time, or a decode step's where the
                                              KV was handed over; `most_tokens`: prompt to compute + longest answer
    policy.finish(key, completed=False)       when it was cancelled, in any state: who is on the host lives here, too
    chosen = policy.choose(batch, now_s)
    plan = swapper.plan(View(chosen=chosen, upcoming=policy.upcoming(3 * batch, batch, now_s), ...))
    carry out plan.drop, .out, .back; give each of plan.run the blocks it needs; compute the step of plan.run
    policy.ran(rows, step_s, now_s)           decoding rows are charged the step, as it would be without chunks
    policy.computed(key, own_s, now_s, tokens=n, first=…)
                                              for each chunk of a prompt: what it would take by itself; `first` with the
                                              one that gives the first token
    policy.measured(step_s)                   after steps that decode only (or predicted for the rows, in mixed ones)
    policy.finish(key)                        for those that ended
    policy.take_changes()                     spans and counters: `Change.what`

A request that is out for a swap, or dropped to be computed again, stays in the policy, and is chosen when its turn is:
`plan` passes it over, or brings it back. `Bandwidth.copied` and `.delayed` are told what copies really did. Only
`upcoming` and `enst_s` need `batch`; they may be left out where KV is never short.
"""
