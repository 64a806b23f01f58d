"""The sections of a configuration, a file each: options with their bounds, and the rules of one section."""
