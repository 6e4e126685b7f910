"""One file a planner, and what planners share."""
