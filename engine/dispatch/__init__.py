"""The parts that `engine.dispatcher` decides with. Pure: no clock, no loop, nothing sent."""
