// Drives a JupyterLab that is already running, as a reader would: opens a notebook, runs all cells, moves its slider with the arrow keys.
//   node tools/lab.mjs URL CHROMIUM SCREENSHOT.png
// Prints one line of JSON with what it saw; tests/test_browser.py starts the server and judges. playwright-core is found through NODE_PATH.
import { createRequire } from 'module';
const { chromium } = createRequire(import.meta.url)('playwright-core');
const [url, executablePath, screenshot] = process.argv.slice(2);
const steps = 5, polling = 300;          // playwright's default polls on animation frames, and these may never come in a headless browser

const browser = await chromium.launch({ executablePath, args: ['--no-sandbox', '--disable-gpu', '--disable-quic', '--disable-dev-shm-usage'] });
const page = await browser.newPage({ viewport: { width: 1300, height: 1000 } });
page.setDefaultTimeout(90_000);
const until = (condition, timeout = 90_000) => page.waitForFunction(condition, null, { polling, timeout });
try {
    await page.goto(url);
    await page.waitForSelector('.jp-Notebook .jp-Cell');
    // the indicator says idle once before there is a kernel, then initializing, connecting, unknown, idle: cells run in between are lost, so it has to stay
    for (let quiet = 0; quiet < 10; quiet++, await page.waitForTimeout(polling))
        if (await page.locator('.jp-Notebook-ExecutionIndicator').getAttribute('data-status') !== 'idle') quiet = 0;
    await page.getByRole('menuitem', { name: 'Run', exact: true }).click();
    await page.getByRole('menuitem', { name: 'Run All Cells', exact: true }).click();
    await until(() => {                  // every cell that holds code has a number, none is waiting
        const prompts = [...document.querySelectorAll('.jp-CodeCell .jp-InputPrompt')].map(p => p.textContent);
        return prompts.length && prompts.every(p => /\[\d+\]/.test(p)) || document.querySelector('[data-mime-type="application/vnd.jupyter.error"]');
    }, 300_000);

    const figure = () => page.locator('.widget-interact img').getAttribute('src');
    const label = async () => Number(await page.locator('.widget-interact .widget-readout').textContent());
    const settled = async value => {     // the label moves at once, the figure when the kernel has drawn
        await until(`Number(document.querySelector('.widget-interact .widget-readout').textContent) === ${value}`);
        await until(() => document.querySelector('.jp-Notebook-ExecutionIndicator[data-status="idle"]'));
        await page.waitForTimeout(1500);
        return { label: await label(), figure: await figure() };
    };
    const handle = page.locator('.widget-interact .noUi-handle');
    await handle.scrollIntoViewIfNeeded();
    const press = async key => { await handle.focus(); for (let i = 0; i < steps; i++) await page.keyboard.press(key); };
    const first = await settled(await label());
    await press('ArrowRight');
    const moved = await settled(Number((first.label + steps * 0.1).toFixed(1)));
    await page.screenshot({ path: screenshot });
    await press('ArrowLeft');
    const back = await settled(first.label);
    console.log(JSON.stringify({
        cells: await page.locator('.jp-CodeCell').count(), images: await page.locator('.jp-OutputArea img').count(),
        errors: await page.locator('[data-mime-type="application/vnd.jupyter.error"]').allTextContents(),
        labels: [first.label, moved.label, back.label], figureChanged: first.figure !== moved.figure, figureCameBack: first.figure === back.figure,
    }));
} catch (error) {
    await page.screenshot({ path: screenshot }).catch(() => {});
    throw error;
} finally { await browser.close(); }
