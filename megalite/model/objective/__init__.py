"""The loss of the last stage under an objective over sequences (`megalite.objectives`)."""
