"""Commands of ``lightning-dcp`` beside those of LightningCLI."""
