"""Native kernels of the CPU's decode step: optional, built where a compiler is found, checked before they are used."""
