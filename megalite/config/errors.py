"""The error of a configuration."""


class ConfigError(Exception):
    """A configuration that cannot run. Each of its messages names the option, its value, the reason and a way
    out."""

    @property
    def messages(self) -> tuple[str, ...]:
        return tuple(map(str, self.args))

    def __str__(self) -> str:
        if len(self.args) == 1:
            return str(self.args[0])
        return "\n".join(
            [f"There are {len(self.args)} mistakes:", *(f"- {message}" for message in self.messages)]
        )
