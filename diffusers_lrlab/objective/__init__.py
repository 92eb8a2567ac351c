"""What an update learns: the noise process, the target, the loss and the noise. The only room that knows DDPM."""
