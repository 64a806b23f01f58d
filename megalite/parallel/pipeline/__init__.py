"""Pipeline parallelism: schedules as plain data (schedule, communication, validator, simulator, partition: no torch) and the runtime."""
