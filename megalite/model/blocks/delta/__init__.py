"""The gated delta rule, with a decay for each head or, as Kimi delta attention, for each channel."""
