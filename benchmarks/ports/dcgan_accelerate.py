"""examples/ports/dcgan.py with Accelerate: PYTHONPATH=examples/ports python dcgan_accelerate.py"""

from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from dcgan import (
    NOISE,
    Settings,
    compare_pictures,
    draw_discs,
    judge,
    make_discriminator,
    make_generator,
)
from torch.utils.data import DataLoader, TensorDataset

# --- training


def main() -> None:
    cfg, folder = Settings(), Path("runs/dcgan")
    accelerator = Accelerator(log_with="tensorboard", project_dir=folder)
    accelerator.init_trackers("logs")
    set_seed(0)
    generator, discriminator = make_generator(cfg.width), make_discriminator(cfg.width)
    optimizer_g = torch.optim.Adam(generator.parameters(), lr=cfg.lr, betas=(0.5, 0.999))
    optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=cfg.lr, betas=(0.5, 0.999))
    pictures = draw_discs(cfg.samples)
    loader = DataLoader(TensorDataset(pictures), 64, shuffle=True)
    generator, discriminator, optimizer_g, optimizer_d, loader = accelerator.prepare(
        generator, discriminator, optimizer_g, optimizer_d, loader
    )
    fixed_noise = torch.randn(256, NOISE, device=accelerator.device)
    saved = sorted(folder.glob("epoch-*"))
    if saved:
        accelerator.load_state(saved[-1])
    best, step = float("inf"), len(saved) * len(loader)

    for epoch in range(len(saved), 8):
        for (real,) in loader:
            fake = generator(torch.randn(len(real), NOISE, device=accelerator.device))

            loss_d = judge(discriminator, real, 1.0) + judge(discriminator, fake.detach(), 0.0)
            optimizer_d.zero_grad()
            accelerator.backward(loss_d)
            optimizer_d.step()

            loss_g = judge(discriminator, fake, 1.0)
            optimizer_g.zero_grad()
            accelerator.backward(loss_g)
            optimizer_g.step()

            step += 1
            if step % 10 == 0:
                accelerator.log({"loss": loss_g.item(), "loss_d": loss_d.item()}, step)
        with torch.no_grad():
            made = generator(fixed_noise).cpu()
        distance = compare_pictures(pictures, made).item()
        accelerator.log({"distance": distance}, step)
        accelerator.print(f"epoch {epoch}: distance {distance:.4f}")
        accelerator.save_state(folder / f"epoch-{epoch:03d}")
        if distance < best:
            best = distance
            accelerator.save_state(folder / "best")
    accelerator.end_training()


if __name__ == "__main__":
    main()
