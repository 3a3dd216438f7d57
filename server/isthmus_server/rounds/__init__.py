"""The round loop and the steps it is made of; read `coordinator` first."""
