"""The training or decoding loop: steps, phases, schedules."""
