"""What rank processes measure beside the clock: bytes of memory, copies, collectives, time on the CPU."""
