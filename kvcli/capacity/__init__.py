"""What a run will take before it takes it: memory, rates of the machine, floors, planning."""
