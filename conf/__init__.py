"""Makes the configuration groups a package, so that an installed wheel carries them."""
