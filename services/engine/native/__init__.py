"""Native kernels of a CPU: optional, built where a compiler is found, checked before they are used."""
