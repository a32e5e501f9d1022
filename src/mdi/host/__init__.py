"""This machine: processor, memory, devices, threads; and the doctor, who says what is in the way."""
