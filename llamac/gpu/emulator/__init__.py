"""An emulator of a graphics processor, which runs the kernels' own text on the CPU: for tests, without a device."""
