from tiny_vllm.cli import main

main()
