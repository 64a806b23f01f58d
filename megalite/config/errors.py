"""The error of a wrong configuration, and how several mistakes become one message. Imports no torch."""

from collections.abc import Iterator
from contextlib import contextmanager


class ConfigError(Exception):
    """A configuration that cannot run. Each of its messages names the option, its value, the reason and a way out."""

    @property
    def messages(self) -> tuple[str, ...]:
        return tuple(map(str, self.args))

    def __str__(self) -> str:
        if len(self.args) == 1:
            return str(self.args[0])
        return "\n".join([f"There are {len(self.args)} mistakes:", *(f"- {message}" for message in self.messages)])


class Mistakes:
    """Collects messages, each of them once, to report all of them together."""

    def __init__(self, messages: tuple[str, ...] | list[str] = ()):
        self.messages = list(dict.fromkeys(messages))

    def add(self, *messages: str) -> None:
        self.messages += [message for message in dict.fromkeys(messages) if message not in self.messages]

    @contextmanager
    def collected(self) -> Iterator[None]:
        """Add the messages of a ConfigError that ends the block, and continue after it."""
        try:
            yield
        except ConfigError as error:
            self.add(*error.messages)

    def report(self) -> None:
        """Raise ConfigError if there are any."""
        if self.messages:
            raise ConfigError(*self.messages)
