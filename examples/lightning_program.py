"""A plain Lightning program that does not import Echelon.

echelon run launch=local launch.procs=2 -- python examples/lightning_program.py
echelon run launch=slurm launch.nodes=2 mode=lightning launch.nodes_flag=--num_nodes \
    launch.gpus_flag=--gpus -- python examples/lightning_program.py
"""

import argparse
import os

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset


class Line(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(20, 1)

    def training_step(self, batch):
        x, y = batch
        loss = torch.nn.functional.mse_loss(self.layer(x), y)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


def main():
    parser = argparse.ArgumentParser()
    nodes = os.environ.get("SLURM_NNODES") or os.environ.get("GROUP_WORLD_SIZE", "1")
    gpus = os.environ.get("SLURM_NTASKS_PER_NODE") or os.environ.get("LOCAL_WORLD_SIZE", "1")
    parser.add_argument("--num_nodes", type=int, default=int(nodes))
    parser.add_argument("--gpus", type=int, default=int(gpus), help="processes per node")
    args = parser.parse_args()
    x = torch.randn(2048, 20, generator=torch.Generator().manual_seed(0))
    data = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=32)
    trainer = lightning.Trainer(
        accelerator="auto",
        devices=args.gpus,
        num_nodes=args.num_nodes,
        strategy="ddp",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Line(), data)
    loss = trainer.callback_metrics["loss"]
    print(f"rank {trainer.global_rank} of {trainer.world_size}: loss {loss:.5f}")
    torch.distributed.destroy_process_group()  # its threads abort one exit in twenty otherwise


if __name__ == "__main__":
    main()
