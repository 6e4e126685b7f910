"""Commands of ``lightning-dcp``; a folder each for those that are not LightningCLI's."""
