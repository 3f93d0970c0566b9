"""`diptych`: the supervisor that starts a mesh on one machine, and the clients of a running one."""
