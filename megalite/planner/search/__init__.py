"""The search for the fastest layouts that fit."""
