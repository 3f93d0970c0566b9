"""The four services of Diptych (gateway, scheduler, prefill, decode) and the libraries they share."""
