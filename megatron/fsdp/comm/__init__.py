"""How bytes move: streams, collectives, memory that NCCL knows. Everything about devices and backends."""
