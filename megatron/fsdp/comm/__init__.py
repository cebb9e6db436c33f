"""Communication: streams, collectives, registered memory, and everything about devices and backends."""
