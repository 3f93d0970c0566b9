"""A discrete-event simulation of one engine: the policies of `services.schedule` on a virtual clock.

    machine    what is simulated: latency model, batch, traffic; and the records of a run
    memory     KV blocks, host pool and link, where KV is limited
    engine     the loop

`Simulation(machine, policy, requests, limit).run()` is deterministic: randomness is in the requests alone. Blocks are
those of `kvtransfer.blocks`; without a limit nobody accounts for them, since nothing could run short.
"""
