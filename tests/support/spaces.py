"""All spaces of layouts, by name."""

from tests.support import attention_layouts, context_layouts, expert_layouts, layouts

SPACES = {
    space.name: space for space in (layouts.SPACE, context_layouts.SPACE, expert_layouts.SPACE, attention_layouts.SPACE)
}
