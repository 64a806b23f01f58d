"""Pipeline parallelism: schedules as plain data (schedule, generator, communication, validator, partition: no torch) and the runtime."""
